"""KV in the caller's pool. A page is float32 [layers][2 (K, V)][page_size][kv_heads][head_dim], one run of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .config import LlamaConfig
from .safetensors_file import Array

Indices = np.ndarray


def page_bytes(config: LlamaConfig, page_size: int) -> int:
    return 4 * config.layers * 2 * page_size * config.kv_row


class PagedKV:
    """Typed views of `pages` pages. Reads copy: whole pages by index into one buffer, which the next read reuses."""

    def __init__(self, pool: memoryview, pages: int, config: LlamaConfig, page_size: int) -> None:
        need = pages * page_bytes(config, page_size)
        if pool.nbytes < need or pool.readonly:
            raise ValueError(
                f"the pool has {pool.nbytes} bytes (read-only: {pool.readonly}); {pages} pages need {need}"
                " writable bytes"
            )
        floats = np.frombuffer(pool, np.float32, count=need // 4)
        self.pages = pages
        self.page_size = page_size
        self._config = config
        self._slots = floats.reshape(pages, config.layers, 2, page_size, config.kv_row)
        self._blocks = floats.reshape(pages * config.layers * 2, page_size * config.kv_row)
        self._buffer = np.empty((0, page_size * config.kv_row), np.float32)

    def write(self, layer: int, pages: Indices, slots: Indices, kv: Array) -> None:
        """kv [rows, 2, kv_row] goes to (page, slot) of each row."""
        self._slots[pages, layer, :, slots] = kv

    def index(self, pages: Sequence[int]) -> Indices:
        """Block numbers of these pages' K, then of their V, for every layer: [layers, 2 * len(pages)]."""
        layers = self._config.layers
        first = np.asarray(pages, np.int64) * (2 * layers)
        within = np.arange(0, 2 * layers, 2, dtype=np.int64)[:, None]
        return np.concatenate([first + within, first + within + 1], axis=1)

    def read(self, blocks: Indices, spare: int = 0) -> tuple[Array, Array]:
        """(K, V), each [tokens, kv_heads, head_dim], of one layer's row of `index`.

        `spare` more pages of zeros follow, for products of a fixed shape."""
        count = len(blocks) // 2
        kv = self._room(2 * (count + spare)).reshape(2, count + spare, -1)
        if spare:
            np.take(self._blocks, blocks[:count], axis=0, out=kv[0, :count], mode="clip")
            np.take(self._blocks, blocks[count:], axis=0, out=kv[1, :count], mode="clip")
            kv[:, count:] = 0.0
        else:
            np.take(self._blocks, blocks, axis=0, out=kv.reshape(2 * count, -1), mode="clip")
        shape = (-1, self._config.kv_heads, self._config.head_dim)
        return kv[0].reshape(shape), kv[1].reshape(shape)

    def _room(self, rows: int) -> Array:
        if len(self._buffer) < rows:
            self._buffer = np.empty((max(rows, 2 * len(self._buffer)), self._buffer.shape[1]), np.float32)
        return self._buffer[:rows]
