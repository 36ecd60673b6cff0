"""The forward pass of a Llama-family model over paged KV, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from . import rope
from .attention import attend_chunk, attend_one
from .paged import PagedKV
from .panels import padded_rows
from .safetensors_file import Array
from .weights import Layer, Weights

CHUNK = 64


class Interrupted(Exception):
    """`stop` said so between two layers. What was written of the step's KV is to be taken as not written."""


Stop = Callable[[], bool]
Attend = Callable[[int, Array, Array], None]
"""(layer, qkv [rows, ...], result [rows, heads * head_dim] to be filled)."""


@dataclass(frozen=True)
class DecodeRow:
    """One running request: its newest token, the position of that token, and pages up to it."""

    token: int
    position: int
    pages: Sequence[int]


class LlamaModel:
    """`fixed`: every product has the same shape whatever the step holds (the batch-invariant mode)."""

    def __init__(self, weights: Weights, *, fixed: bool) -> None:
        self.config = weights.config
        self.fixed = fixed
        self._weights = weights
        self._cos, self._sin = rope.tables(weights.config)
        self._scale = np.float32(weights.config.head_dim**-0.5)

    def prefill(
        self, kv: PagedKV, tokens: Sequence[int], start: int, computed: int, pages: Sequence[int], stop: Stop
    ) -> Array:
        """Hidden state [hidden] of the last of `tokens`, which stand at positions start..; writes the KV of positions
        from `computed` on. In fixed mode start is a multiple of the chunk."""
        end = start + len(tokens)
        used = kv.index(pages[: -(-end // kv.page_size)])
        place = np.arange(computed, end)
        page_of = np.asarray(pages, np.int64)[place // kv.page_size]
        slot_of = place % kv.page_size

        def attend(layer: int, qkv: Array, result: Array) -> None:
            q, new = self._split(qkv[: len(tokens)])
            kv.write(layer, page_of, slot_of, new[computed - start :])
            result[: len(tokens)] = self._attend_chunk(kv, used[layer], q, start).reshape(len(tokens), -1)

        hidden = self._run(tokens, np.arange(start, end), attend, stop)
        last: Array = hidden[len(tokens) - 1]
        return last

    def _attend_chunk(self, kv: PagedKV, blocks: np.ndarray, q: Array, start: int) -> Array:
        rows = len(q)
        if self.fixed:
            spare = -(-(start + CHUNK) // kv.page_size) - len(blocks) // 2
            k, v = kv.read(blocks, spare)
            v[start + rows :] = 0.0  # masked, but a NaN left in a page would still spoil the product
            k[start + rows :] = 0.0
            padded = np.zeros((CHUNK, *q.shape[1:]), np.float32)
            padded[:rows] = q
            return attend_chunk(padded, k[: start + CHUNK], v[: start + CHUNK], start)[:rows]
        k, v = kv.read(blocks)
        return attend_chunk(q, k[: start + rows], v[: start + rows], start)

    def decode(self, kv: PagedKV, rows: Sequence[DecodeRow], stop: Stop, dropped: Set[int] = frozenset()) -> Array:
        """Hidden states [len(rows), hidden] after each row's token, whose KV is written. Rows whose numbers `stop` puts
        into `dropped` are given up: from that layer on their pages are not touched, and their states mean nothing."""
        position = np.array([row.position for row in rows])
        page_of = np.array([row.pages[row.position // kv.page_size] for row in rows])
        slot_of = position % kv.page_size
        used = [kv.index(row.pages[: row.position // kv.page_size + 1]) for row in rows]

        def attend(layer: int, qkv: Array, result: Array) -> None:
            q, new = self._split(qkv[: len(rows)])
            if dropped:
                kept = [number for number in range(len(rows)) if number not in dropped]
                kv.write(layer, page_of[kept], slot_of[kept], new[kept])
            else:
                kv.write(layer, page_of, slot_of, new)
            for number, row in enumerate(rows):
                if number in dropped:
                    result[number] = 0.0
                    continue
                k, v = kv.read(used[number][layer])
                result[number] = attend_one(q[number], k, v, row.position + 1, kv.page_size).reshape(-1)

        return self._run([row.token for row in rows], position, attend, stop)[: len(rows)]

    def logits(self, hidden: Array) -> Array:
        """[rows, hidden] -> [rows, vocab]."""
        rows = len(hidden)
        padded = np.zeros((padded_rows(rows, fixed=self.fixed), hidden.shape[1]), np.float32)
        padded[:rows] = hidden
        return self._weights.head(padded)[:rows]

    def _run(self, tokens: Sequence[int], positions: np.ndarray, attend: Attend, stop: Stop) -> Array:
        """All layers and the final norm over [rows, hidden], rows padded to whole tiles with zeros."""
        x = np.zeros((padded_rows(len(tokens), fixed=self.fixed), self.config.hidden), np.float32)
        x[: len(tokens)] = self._embed(np.asarray(tokens))
        at = np.zeros(len(x), np.int64)
        at[: len(tokens)] = positions
        cos, sin = self._cos[at][:, None], self._sin[at][:, None]
        mixed = np.zeros((len(x), self.config.heads * self.config.head_dim), np.float32)
        for number, layer in enumerate(self._weights.layers):
            if stop():
                raise Interrupted
            qkv = layer.qkv(self._norm(x, layer.input_norm))
            self._turn(layer, qkv, cos, sin)
            attend(number, qkv, mixed)
            x += layer.o(mixed)
            x += self._mlp(layer, self._norm(x, layer.post_norm))
        return self._norm(x, self._weights.norm)

    def _embed(self, tokens: np.ndarray) -> Array:
        table = self._weights.embedding
        return self._weights.head.rows(tokens) if table is None else table[tokens]

    def _turn(self, layer: Layer, qkv: Array, cos: Array, sin: Array) -> None:
        """Head norms (Qwen3), rotation of q and k, scale of q, in place."""
        config = self.config
        width = (config.heads + config.kv_heads) * config.head_dim
        heads = qkv[:, :width].reshape(len(qkv), -1, config.head_dim)
        assert heads.base is not None, "a view, so that the rotation lands in qkv"
        q, k = heads[:, : config.heads], heads[:, config.heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q[:] = self._norm(q, layer.q_norm)
            k[:] = self._norm(k, layer.k_norm)
        rope.rotate(heads, cos, sin)
        q *= self._scale

    def _split(self, qkv: Array) -> tuple[Array, Array]:
        """(q [rows, heads, head_dim], K and V [rows, 2, kv_row])."""
        rows, width = len(qkv), self.config.heads * self.config.head_dim
        return qkv[:, :width].reshape(rows, -1, self.config.head_dim), qkv[:, width:].reshape(rows, 2, -1)

    def _norm(self, x: Array, weight: Array) -> Array:
        square = np.einsum("...i,...i->...", x, x)[..., None]
        scale = 1.0 / np.sqrt(square * np.float32(1.0 / x.shape[-1]) + np.float32(self.config.norm_eps))
        normed: Array = x * scale
        normed *= weight
        return normed

    def _mlp(self, layer: Layer, x: Array) -> Array:
        both = layer.gate_up(x)
        gate, up = both[:, : self.config.ffn], both[:, self.config.ffn :]
        with np.errstate(over="ignore"):
            silu = np.exp(-gate)
        silu += 1.0
        np.divide(gate, silu, out=silu)
        silu *= up
        return layer.down(silu)
