"""From a row of logits to a token. Position i's draw depends on (seed, i) and the logits alone."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from pdplane.core.frames import TopLogprob
from pdplane.worker.engine import Sampling, Token

from .safetensors_file import Array

_LIKELY = 1024
"""Tokens sorted first when top_p asks for an order: almost always enough."""

_SEED_MASK = 2**64 - 1


class BadLogits(ValueError):
    """The logits hold no number: the KV or the weights are damaged."""


def sample(logits: Array, sampling: Sampling, seed: int, position: int, banned: Collection[int] = ()) -> Token:
    """A token from raw logits [vocab]. `banned` tokens are out of reach. Logprobs are log-softmax of the raw logits.

    Raises BadLogits where no logit is finite or one is NaN.
    """
    if not np.isfinite(logits.max()):
        raise BadLogits(f"the logits at position {position} are not finite")
    allowed = logits
    if banned:
        allowed = logits.copy()
        allowed[list(banned)] = -np.inf
    chosen = int(allowed.argmax()) if sampling.temperature == 0 else _draw(allowed, sampling, seed, position)
    if not sampling.logprobs and not sampling.top_logprobs:
        return Token(chosen)
    logprobs = _log_softmax(logits)
    return Token(chosen, float(logprobs[chosen]), _top(logprobs, sampling.top_logprobs))


def _draw(logits: Array, sampling: Sampling, seed: int, position: int) -> int:
    """Inverse of the cumulative distribution at one uniform number keyed by (seed, position)."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    ids = _nucleus(weights, sampling)
    kept = weights if ids is None else weights[ids]
    cumulative = np.cumsum(kept)
    uniform = np.random.Generator(np.random.Philox(key=[seed & _SEED_MASK, position])).random()
    place = min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), len(kept) - 1)
    return place if ids is None else int(ids[place])


def _nucleus(weights: np.ndarray, sampling: Sampling) -> np.ndarray | None:
    """Ids that top_k and top_p leave, likeliest first; None where both are off."""
    top_k = sampling.top_k if 0 < sampling.top_k < len(weights) else 0
    if not top_k and sampling.top_p >= 1.0:
        return None
    total = weights.sum()
    ids = _likeliest(weights, top_k or min(_LIKELY, len(weights)))
    if sampling.top_p >= 1.0:
        return ids
    cumulative = np.cumsum(weights[ids])
    if top_k:
        total = cumulative[-1]
    elif cumulative[-1] < sampling.top_p * total:
        ids = _likeliest(weights, len(weights))
        cumulative = np.cumsum(weights[ids])
    enough = int(np.searchsorted(cumulative, sampling.top_p * total)) + 1
    return ids[:enough]


def _likeliest(weights: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest weights, in order; equal weights by id."""
    some = np.arange(len(weights)) if count >= len(weights) else np.sort(np.argpartition(-weights, count - 1)[:count])
    ordered: np.ndarray = some[np.argsort(-weights[some], kind="stable")]
    return ordered


def _log_softmax(logits: Array) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    logprobs: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return logprobs


def _top(logprobs: np.ndarray, count: int) -> tuple[TopLogprob, ...]:
    if count <= 0:
        return ()
    ids = _likeliest(logprobs, min(count, len(logprobs)))
    return tuple(TopLogprob(int(token), float(logprobs[token])) for token in ids)
