"""Rotary position embedding, half-split: dimension i turns with dimension i + head_dim / 2."""

from __future__ import annotations

import math

import numpy as np

from .config import Llama3Scaling, LlamaConfig
from .safetensors_file import Array


def tables(config: LlamaConfig) -> tuple[Array, Array]:
    """(cos, sin), each [context, head_dim / 2]; angles in double precision."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    if config.llama3 is not None:
        frequency = _stretch(frequency, config.llama3)
    angle = np.outer(np.arange(config.context_len, dtype=np.float64) / config.rope_factor, frequency)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _stretch(frequency: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Slow frequencies are divided by the factor, fast ones stay, those between blend linearly."""
    turns = scaling.original_context * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    stretched: np.ndarray = (1 - blend) * frequency / scaling.factor + blend * frequency
    return stretched


def rotate(heads: Array, cos: Array, sin: Array) -> None:
    """Turns `heads` [rows, heads, head_dim] in place; cos and sin are [rows, 1, head_dim / 2]."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    turned = first * sin
    first *= cos
    first -= second * sin
    second *= cos
    second += turned
