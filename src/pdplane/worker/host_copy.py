"""The KV of a request that was retracted, in host memory, while others have its pages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdplane.core.ids import PageId
from pdplane.core.slices import shard_bytes

from .engine import ModelSpec


class Pools:
    """The memory of one dp group's pages, one pool per tensor parallel rank (None: the rank holds no heads)."""

    def __init__(self, pools: Sequence[memoryview | None], model: ModelSpec) -> None:
        sizes = [shard_bytes(model.groups, model.page_size, rank, len(pools)) for rank in range(len(pools))]
        self._shards = [(pool.cast("B"), size) for pool, size in zip(pools, sizes, strict=True) if pool is not None]

    def save(self, pages: Sequence[PageId]) -> HostCopy:
        """The bytes of these pages, of every pool."""
        assert self._shards, "an engine thread without pools has nothing to retract from"
        shards = [b"".join([pool[page * size : (page + 1) * size] for page in pages]) for pool, size in self._shards]
        assert [len(shard) for shard in shards] == [len(pages) * size for _, size in self._shards], "a page of no pool"
        return HostCopy(len(pages), tuple(shards))

    def load(self, copy: HostCopy, pages: Sequence[PageId]) -> None:
        """Writes the copy into the first of `pages`, which must be at least as many as it holds."""
        assert len(pages) >= copy.pages, f"{copy.pages} pages do not fit into {len(pages)}"
        for (pool, size), kept in zip(self._shards, copy.shards, strict=True):
            source = memoryview(kept)
            for number, page in enumerate(pages[: copy.pages]):
                pool[page * size : (page + 1) * size] = source[number * size : (number + 1) * size]


class HostCopy(msgspec.Struct, frozen=True):
    """`shards`: per pool, the bytes of `pages` pages in the order of the request's tokens."""

    pages: int
    shards: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(shard) for shard in self.shards)
