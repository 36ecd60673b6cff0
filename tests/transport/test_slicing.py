"""Strided copies against the same done byte by byte."""

from __future__ import annotations

import random

import pytest

from pdplane.core.ids import PageId
from pdplane.core.slices import Slice, Span, slice_between, whole_page
from pdplane.transport import checksum, slicing
from pdplane.transport.checksum import NoChecksum

from .rigs import HEADS, INDEX, LATENT, TOKENS, P, full_page, shard_of

PAGES = 8


def pages(*numbers: int) -> list[PageId]:
    return [PageId(number) for number in numbers]


def a_slice(seed: int) -> Slice:
    """One to four spans that do not overlap, with gaps or without, in any order at decode."""
    rng = random.Random(seed)
    src = dst = 0
    spans = []
    for _ in range(rng.randint(1, 4)):
        run, count = rng.choice([1, 3, 8, 64, 384]), rng.randint(1, 9)
        src_step, dst_step = run + rng.choice([0, 0, 5]), run + rng.choice([0, 0, 16])
        src, dst = src + rng.choice([0, 0, 7]), dst + rng.choice([0, 0, 1])
        spans.append(Span(src, dst, run, src_step, dst_step, count))
        src, dst = src + src_step * count, dst + dst_step * count
    return Slice(src + rng.choice([0, 9]), dst + rng.choice([0, 2]), tuple(spans))


def on_the_way(slice_: Slice, page: bytes) -> bytes:
    runs = ((span.src + at * span.src_step, span.run) for span in slice_.spans for at in range(span.count))
    return b"".join(page[start : start + run] for start, run in runs)


def placed(slice_: Slice, data: bytes, page: bytes) -> bytes:
    out, taken = bytearray(page), 0
    for span in slice_.spans:
        for at in range(span.count):
            start = span.dst + at * span.dst_step
            out[start : start + span.run] = data[taken : taken + span.run]
            taken += span.run
    return bytes(out)


def filled(size: int) -> bytearray:
    return bytearray(random.Random(size).randbytes(PAGES * size))


def cut(pool: bytes | bytearray, size: int) -> list[bytes]:
    return [bytes(pool[at : at + size]) for at in range(0, len(pool), size)]


SLICES = [*map(a_slice, range(60)), whole_page(4096), whole_page(1)]
SRC, DST = pages(5, 0, 7, 2), pages(1, 6, 3, 0)


@pytest.mark.parametrize("slice_", SLICES)
def test_what_is_gathered_is_scattered_and_collected_again(slice_: Slice) -> None:
    source, target, out = filled(slice_.src_page), filled(slice_.dst_page), bytearray(4 * slice_.size_bytes)
    before, sources = cut(target, slice_.dst_page), cut(source, slice_.src_page)
    slicing.gather(memoryview(source), slice_, SRC, memoryview(out))
    assert out == b"".join(on_the_way(slice_, sources[page]) for page in SRC)
    slicing.scatter(memoryview(out), slice_, DST, memoryview(target))
    after = cut(target, slice_.dst_page)
    for src, dst in zip(SRC, DST, strict=True):
        assert after[dst] == placed(slice_, on_the_way(slice_, sources[src]), before[dst])
    assert all(after[page] == before[page] for page in range(PAGES) if page not in DST)
    again = bytearray(len(out))
    slicing.collect(memoryview(target), slice_, DST, memoryview(again))
    assert again == out


@pytest.mark.parametrize("slice_", SLICES)
def test_a_copy_from_pool_to_pool_is_a_gather_and_a_scatter(slice_: Slice) -> None:
    source = bytes(filled(slice_.src_page))  # read-only, as a peer's mapping is
    one, two = filled(slice_.dst_page), filled(slice_.dst_page)
    way = memoryview(bytearray(4 * slice_.size_bytes))
    slicing.gather(memoryview(source), slice_, SRC, way)
    slicing.scatter(way, slice_, DST, memoryview(one))
    slicing.copy(memoryview(source), SRC, slice_, memoryview(two), DST)
    assert one == two


@pytest.mark.parametrize("slice_", SLICES)
def test_both_ends_agree_on_a_checksum_and_any_byte_changes_it(slice_: Slice) -> None:
    source, target = filled(slice_.src_page), filled(slice_.dst_page)
    slicing.copy(memoryview(source), SRC, slice_, memoryview(target), DST)
    digest = checksum.of_source(memoryview(source), slice_, SRC)
    assert checksum.of_target(memoryview(target), slice_, DST) == digest
    last = slice_.spans[-1]
    target[DST[2] * slice_.dst_page + last.dst + (last.count - 1) * last.dst_step + last.run - 1] ^= 1
    assert checksum.of_target(memoryview(target), slice_, DST) != digest


@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (2, 4), (4, 1), (4, 2), (3, 1), (1, 3)])
def test_the_ranks_of_one_side_fill_every_rank_of_the_other(tp: tuple[int, int]) -> None:
    groups = (HEADS, LATENT, INDEX)
    full = full_page(groups, 1)
    for rank in range(tp[1]):
        wanted = shard_of(groups, full, rank, tp[1])
        here = memoryview(bytearray(len(wanted)))
        for source in range(tp[0]):
            slice_ = slice_between(groups, TOKENS, (source, tp[0]), (rank, tp[1]))
            if slice_ is not None:
                slicing.copy(memoryview(shard_of(groups, full, source, tp[0])), pages(0), slice_, here, pages(0))
        assert here == wanted


def test_a_page_that_goes_whole_needs_no_staging_at_its_end() -> None:
    halves = slice_between((HEADS,), TOKENS, (0, 1), (1, 2))
    assert halves is not None
    assert not slicing.packed_at_source(halves)
    assert slicing.packed_at_target(halves)
    assert slicing.packed_at_source(whole_page(64))
    assert slicing.packed_at_target(whole_page(64))


def test_a_run_outside_of_the_memory_is_an_error_and_not_a_write() -> None:
    slice_ = Slice(64, 64, (Span(0, 8, 16, 32, 32, 2), Span(32, 60, 8, 32, 8, 1)))
    with pytest.raises((ValueError, TypeError)):
        slicing.copy(memoryview(bytes(64)), pages(0), slice_, memoryview(bytearray(64)), pages(0))


def test_a_slice_of_other_pages_than_the_pools_names_both_sizes() -> None:
    with pytest.raises(ValueError, match="a slice of pages of 64 bytes, this pool has pages of 128"):
        slicing.check_source(whole_page(64), P, 128)


def test_who_cannot_compute_checksums_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    checksum.require()
    monkeypatch.setattr(checksum, "AVAILABLE", False)
    with pytest.raises(NoChecksum, match=r"pip install 'pdplane\[checksum\]'"):
        checksum.require()
