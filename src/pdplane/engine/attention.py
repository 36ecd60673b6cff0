"""Causal attention of one sequence, with query heads in groups over shared KV heads.

A sequence attends alone, in shapes that follow from its own length: neighbours and page numbers cannot show.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .safetensors_file import Array


def attend_one(q: Array, k: Array, v: Array, length: int, page_size: int) -> Array:
    """One query: q [heads, head_dim] (scaled), k and v [pages * page_size, kv_heads, head_dim], of which `length`
    tokens count -> [heads, head_dim].

    The scores are taken page by page: a small product needs no packing of K.
    """
    tokens, kv_heads, head_dim = k.shape
    group = q.shape[0] // kv_heads
    scores = np.empty((kv_heads, group, tokens), np.float32)
    np.matmul(
        q.reshape(kv_heads, 1, group, head_dim),
        k.reshape(-1, page_size, kv_heads, head_dim).transpose(2, 0, 3, 1),
        out=scores.reshape(kv_heads, group, -1, page_size).transpose(0, 2, 1, 3),
    )
    weights = scores[:, :, :length]
    total = _exponentials(weights)
    out: Array = np.matmul(weights, v[:length].transpose(1, 0, 2))
    out /= total
    return out.reshape(-1, head_dim)


def attend_chunk(q: Array, k: Array, v: Array, start: int) -> Array:
    """A run of queries: q [rows, heads, head_dim] (scaled) at positions start.. and k, v
    [start + rows, kv_heads, head_dim] -> [rows, heads, head_dim]."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    stacked = np.ascontiguousarray(q.reshape(rows, kv_heads, group, head_dim).transpose(1, 2, 0, 3))
    weights = np.matmul(stacked.reshape(kv_heads, group * rows, head_dim), k.transpose(1, 2, 0))
    weights.reshape(kv_heads, group, rows, -1)[..., start:] += _causal(rows)
    total = _exponentials(weights)
    out: Array = np.matmul(weights, v.transpose(1, 0, 2))
    out /= total
    return out.reshape(kv_heads, group, rows, head_dim).transpose(2, 0, 1, 3).reshape(rows, heads, head_dim)


def _exponentials(scores: Array) -> Array:
    """Scores become exp(score - max) in place; returns their sums, by which the result is still to be divided."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total: Array = scores.sum(axis=-1, keepdims=True)
    return total


@cache
def _causal(rows: int) -> Array:
    return np.triu(np.full((rows, rows), -np.inf, np.float32), k=1)
