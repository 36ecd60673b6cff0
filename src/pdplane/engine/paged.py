"""KV in the caller's pools, one per tensor parallel rank.

Rank r's page is float32 [layers][2 (K, V)][page_size][its heads][head_dim], one run of bytes; page i of every pool
together holds page i's KV. A rank without heads has no pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdplane.core.slices import heads_of

from .config import LlamaConfig
from .safetensors_file import Array

Indices = np.ndarray


def page_bytes(config: LlamaConfig, page_size: int) -> int:
    """Of the whole page, over all ranks."""
    return 4 * config.layers * 2 * page_size * config.kv_row


@dataclass(frozen=True)
class _Shard:
    """One rank's pool, typed twice over the same bytes. `columns`: what it holds of a row of K (or V)."""

    columns: slice
    slots: Array  # [pages, layers, 2, page_size, its columns]
    blocks: Array  # [pages * layers * 2, page_size * its columns]

    @property
    def width(self) -> int:
        return int(self.columns.stop - self.columns.start)


class PagedKV:
    """Typed views of `pages` pages. Reads copy: whole pages by index into one buffer, which the next read reuses; what
    they return is the same whatever the number of pools. Raises ValueError for a pool that does not fit its rank."""

    def __init__(self, pools: Sequence[memoryview | None], pages: int, config: LlamaConfig, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._config = config
        shards = [_shard(pools, rank, pages, config, page_size) for rank in range(len(pools))]
        self._shards = [shard for shard in shards if shard is not None]
        if not self._shards:
            raise ValueError(f"{len(pools)} pools hold no KV head; give one pool per tensor parallel rank")
        self._buffer = np.empty((0, page_size * config.kv_row), np.float32)
        self._part = np.empty((0, page_size * max(shard.width for shard in self._shards)), np.float32)

    def write(self, layer: int, pages: Indices, slots: Indices, kv: Array) -> None:
        """kv [rows, 2, kv_row] goes to (page, slot) of each row."""
        for shard in self._shards:
            shard.slots[pages, layer, :, slots] = kv[..., shard.columns]

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
        if len(self._shards) > 1:
            self._gather(blocks, kv)
        elif spare:
            self._take(blocks[:count], kv[0, :count])
            self._take(blocks[count:], kv[1, :count])
        else:
            self._take(blocks, kv.reshape(2 * count, -1))
        if spare:
            kv[:, count:] = 0.0
        shape = (-1, self._config.kv_heads, self._config.head_dim)
        return kv[0].reshape(shape), kv[1].reshape(shape)

    def _take(self, blocks: Indices, out: Array) -> None:
        """Of the only pool."""
        np.take(self._shards[0].blocks, blocks, axis=0, out=out, mode="clip")

    def _gather(self, blocks: Indices, kv: Array) -> None:
        """Each rank's heads side by side in kv [2, at least len(blocks) / 2 pages, page_size * kv_row]."""
        count = len(blocks) // 2
        rows = kv[:, :count].reshape(2, count, self.page_size, -1)
        if len(self._part) < len(blocks):
            self._part = np.empty((max(len(blocks), 2 * len(self._part)), self._part.shape[1]), np.float32)
        scratch = self._part.reshape(-1)
        for shard in self._shards:
            part = scratch[: len(blocks) * self.page_size * shard.width].reshape(len(blocks), -1)
            np.take(shard.blocks, blocks, axis=0, out=part, mode="clip")
            rows[..., shard.columns] = part.reshape(2, count, self.page_size, -1)

    def _room(self, rows: int) -> Array:
        if len(self._buffer) < rows:
            self._buffer = np.empty((max(rows, 2 * len(self._buffer)), self._buffer.shape[1]), np.float32)
        return self._buffer[:rows]


def _shard(
    pools: Sequence[memoryview | None], rank: int, pages: int, config: LlamaConfig, page_size: int
) -> _Shard | None:
    heads = heads_of(config.kv_heads, rank, len(pools))
    if not heads:
        return None
    columns = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
    width = columns.stop - columns.start
    need = 4 * pages * config.layers * 2 * page_size * width
    pool = pools[rank]
    whose = f"the pool of tensor parallel rank {rank} of {len(pools)}"
    if pool is None:
        raise ValueError(f"{whose} is missing, and the rank holds KV heads {heads.start} to {heads.stop - 1}")
    if pool.nbytes < need or pool.readonly:
        raise ValueError(
            f"{whose} has {pool.nbytes} bytes (read-only: {pool.readonly}); {pages} pages need {need} writable bytes"
        )
    floats = np.frombuffer(pool, np.float32, count=need // 4)
    return _Shard(
        columns=columns,
        slots=floats.reshape(pages, config.layers, 2, page_size, width),
        blocks=floats.reshape(pages * config.layers * 2, page_size * width),
    )
