"""Copies what a slice says of pages: out of a pool into contiguous bytes, back into a pool, or from pool to pool.

On the way a page is its spans one after the other, each of them its runs one after the other. Where a pool's pages are
just that, they are copied as pages; elsewhere a span of a page is one strided numpy copy, whatever the number of its
runs. Callers have checked that the page numbers are the pool's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pdplane.core.ids import PageId, Seat
from pdplane.core.slices import Slice, Span

Runs: TypeAlias = npt.NDArray[np.void]
"""[page][run], each element one run of a span."""


@functools.lru_cache(maxsize=1024)
def packed_at_source(slice_: Slice) -> bool:
    """Prefill's page is, as it lies, what goes on the way."""
    return _fill(slice_.src_page, slice_.spans, [(span.src, span.src_step) for span in slice_.spans])


@functools.lru_cache(maxsize=1024)
def packed_at_target(slice_: Slice) -> bool:
    """What comes is, as it comes, decode's page."""
    return _fill(slice_.dst_page, slice_.spans, [(span.dst, span.dst_step) for span in slice_.spans])


def _fill(page: int, spans: Sequence[Span], places: Sequence[tuple[int, int]]) -> bool:
    """Spans whose runs begin at places[i][0], each places[i][1] after the last, fill the page one after the other."""
    at = 0
    for span, (start, step) in zip(spans, places, strict=True):
        if start != at or (step != span.run and span.count > 1):
            return False
        at += span.run * span.count
    return at == page


def check_source(slice_: Slice, peer: Seat, page_bytes: int) -> None:
    """ValueError for a slice of other pages than those of this prefill's pool (decode's: LandingTable.arm)."""
    if slice_.src_page != page_bytes:
        raise ValueError(
            f"peer {peer}: a slice of pages of {slice_.src_page} bytes, this pool has pages of {page_bytes}"
        )


def gather(pool: memoryview, slice_: Slice, pages: Sequence[PageId], out: memoryview) -> None:
    """From the pages of a prefill's pool to the `len(pages) * slice_.size_bytes` bytes of `out`."""
    if packed_at_source(slice_):
        _copy_pages(pool, pages, out, range(len(pages)), slice_.size_bytes)
    else:
        _copy_runs(_source(pool, slice_), pages, _packed(out, slice_), range(len(pages)))


def scatter(data: memoryview, slice_: Slice, pages: Sequence[PageId], pool: memoryview) -> None:
    """The reverse, into the pages of a decode's pool."""
    if packed_at_target(slice_):
        _copy_pages(data, range(len(pages)), pool, pages, slice_.size_bytes)
    else:
        _copy_runs(_packed(data, slice_), range(len(pages)), _target(pool, slice_), pages)


def collect(pool: memoryview, slice_: Slice, pages: Sequence[PageId], out: memoryview) -> None:
    """What `scatter` has put into the pages of a decode's pool, as it came."""
    if packed_at_target(slice_):
        _copy_pages(pool, pages, out, range(len(pages)), slice_.size_bytes)
    else:
        _copy_runs(_target(pool, slice_), pages, _packed(out, slice_), range(len(pages)))


def copy(source: memoryview, src: Sequence[PageId], slice_: Slice, target: memoryview, dst: Sequence[PageId]) -> None:
    """From page `src[i]` of a prefill's pool to page `dst[i]` of a decode's."""
    if packed_at_source(slice_) and packed_at_target(slice_):
        _copy_pages(source, src, target, dst, slice_.size_bytes)
    else:
        _copy_runs(_source(source, slice_), src, _target(target, slice_), dst)


def _copy_pages(source: memoryview, src: Sequence[int], target: memoryview, dst: Sequence[int], size: int) -> None:
    """By numpy, which gives up the interpreter lock for it."""
    theirs, ours = (np.frombuffer(memory, np.uint8).reshape(-1, size) for memory in (source, target))
    for there, here in zip(src, dst, strict=True):
        ours[here] = theirs[there]


def _copy_runs(source: Iterable[Runs], src: Sequence[int], target: Iterable[Runs], dst: Sequence[int]) -> None:
    for ours, theirs in zip(source, target, strict=True):
        for there, here in zip(src, dst, strict=True):
            theirs[here] = ours[there]


# --- the three places where runs lie: a view for each span. It must not outlive the call, or the pool cannot close ---


def _source(pool: memoryview, slice_: Slice) -> list[Runs]:
    page = slice_.src_page
    return [_runs(pool, page, span.src, span.run, span.src_step, span.count) for span in slice_.spans]


def _target(pool: memoryview, slice_: Slice) -> list[Runs]:
    page = slice_.dst_page
    return [_runs(pool, page, span.dst, span.run, span.dst_step, span.count) for span in slice_.spans]


def _packed(data: memoryview, slice_: Slice) -> list[Runs]:
    ends = itertools.accumulate(span.run * span.count for span in slice_.spans)
    starts = (end - span.run * span.count for end, span in zip(ends, slice_.spans, strict=True))
    page = slice_.size_bytes
    return [
        _runs(data, page, start, span.run, span.run, span.count)
        for start, span in zip(starts, slice_.spans, strict=True)
    ]


def _runs(memory: memoryview, page: int, at: int, run: int, step: int, count: int) -> Runs:
    """ValueError where a run would lie outside of the memory."""
    return np.ndarray((len(memory) // page, count), f"V{run}", memory, at, (page, step))
