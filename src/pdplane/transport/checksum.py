"""xxh3 over what a frame brings, from pool to pool: taken from prefill's pages, verified from decode's after landing.

So it covers staging, the wire and scattering alike. The package `xxhash` is an extra: only who checks needs it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from pdplane.core.ids import PageId
from pdplane.core.slices import Slice

from . import slicing
from .landing_table import Claim, Verdict
from .pool import PagePool

AVAILABLE = importlib.util.find_spec("xxhash") is not None
REMEDY = "page checksums need the package xxhash: pip install 'pdplane[checksum]'"


class NoChecksum(RuntimeError):
    """The extra is not installed."""


def require() -> None:
    """NoChecksum where this process cannot compute one."""
    if not AVAILABLE:
        raise NoChecksum(REMEDY)


def of_source(pool: memoryview, slice_: Slice, pages: Sequence[PageId]) -> int:
    """xxh3_64 of what these pages of a prefill's pool bring, in the order of slicing.gather."""
    if slicing.packed_at_source(slice_):
        return _of_pages(pool, slice_.src_page, pages)
    return _of_slices(slicing.gather, pool, slice_, pages)


def of_target(pool: memoryview, slice_: Slice, pages: Sequence[PageId]) -> int:
    """xxh3_64 of the same as it lies in these pages of a decode's pool."""
    if slicing.packed_at_target(slice_):
        return _of_pages(pool, slice_.dst_page, pages)
    return _of_slices(slicing.collect, pool, slice_, pages)


def _of_pages(pool: memoryview, page_bytes: int, pages: Sequence[PageId]) -> int:
    from xxhash import xxh3_64

    state = xxh3_64()
    for page in pages:
        state.update(pool[page * page_bytes : (page + 1) * page_bytes])
    return state.intdigest()


_Gather = Callable[[memoryview, Slice, Sequence[PageId], memoryview], None]


def _of_slices(gather: _Gather, pool: memoryview, slice_: Slice, pages: Sequence[PageId]) -> int:
    from xxhash import xxh3_64

    state = xxh3_64()
    one = memoryview(bytearray(slice_.size_bytes))
    for page in pages:
        gather(pool, slice_, [page], one)
        state.update(one)
    return state.intdigest()


class Verifier:
    """The last look at a frame whose bytes are all in the pages, while the landing is still inside the fence."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool

    def verdict(self, claim: Claim, digest: int | None) -> Verdict:
        """`digest`: what the source says; None where it says nothing. NoChecksum where this process cannot tell."""
        if digest is None:
            return Verdict.LANDED
        require()
        here = of_target(self.pool.memory, claim.slice, claim.pages)
        return Verdict.LANDED if here == digest else Verdict.CORRUPT
