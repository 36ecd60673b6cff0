"""Which bytes of a page one link moves, where KV heads are split over the ranks of each side.

A rank r of n holds the heads from r * heads // n up to (r + 1) * heads // n: as even as whole heads allow, and none
at all where there are fewer heads than ranks. Rows without heads (MLA) are whole on every rank; decode's rank takes
them from one prefill rank, and the others are dummies, which are granted nothing and owe no proof.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .ids import Rank, Shape
from .layout import LayoutGroup


class Span(msgspec.Struct, frozen=True):
    """`count` runs of `run` bytes: run i is at src + i * src_step in prefill's page and at dst + i * dst_step in
    decode's."""

    src: int
    dst: int
    run: int
    src_step: int
    dst_step: int
    count: int


class Slice(msgspec.Struct, frozen=True):
    """What one link moves of every page. `src_page` and `dst_page`: bytes of a page in each side's pool."""

    src_page: int
    dst_page: int
    spans: tuple[Span, ...]

    @property
    def size_bytes(self) -> int:
        """Of one page, on the way."""
        return sum(span.run * span.count for span in self.spans)

    @property
    def whole(self) -> bool:
        """All of the page, at the same place on both sides."""
        return self.src_page == self.dst_page == self.size_bytes and all(span.src == span.dst for span in self.spans)


def whole_page(page_bytes: int) -> Slice:
    return Slice(page_bytes, page_bytes, (Span(0, 0, page_bytes, page_bytes, page_bytes, 1),))


def heads_of(heads: int, rank: int, ranks: int) -> range:
    """The heads that tensor parallel rank `rank` of `ranks` holds."""
    return range(rank * heads // ranks, (rank + 1) * heads // ranks)


def source_rank(rank: int, ranks: int, prefill_ranks: int) -> int:
    """The prefill rank from which decode's `rank` of `ranks` takes rows that every rank holds whole."""
    return rank * prefill_ranks // ranks


def shard_bytes(groups: Sequence[LayoutGroup], page_size: int, rank: int, ranks: int) -> int:
    """Bytes of a page in the pool of one tensor parallel rank; 0: it holds nothing."""
    return sum(_rows(group, page_size) * _row_part(group, rank, ranks) for group in groups)


def slice_between(
    groups: Sequence[LayoutGroup], page_size: int, prefill: tuple[int, int], decode: tuple[int, int]
) -> Slice | None:
    """What goes from prefill's to decode's tensor parallel rank, each (rank, ranks); None: nothing does."""
    spans: list[Span] = []
    src_at = dst_at = 0
    for group in groups:
        rows, src_row, dst_row = _rows(group, page_size), _row_part(group, *prefill), _row_part(group, *decode)
        if group.heads:
            ours, theirs = heads_of(group.heads, *prefill), heads_of(group.heads, *decode)
            first, last = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
            head = group.row_bytes // group.parts // group.heads
            src, dst, run = (first - ours.start) * head, (first - theirs.start) * head, (last - first) * head
        else:
            real = prefill[0] == source_rank(*decode, prefill[1])
            src, dst, run = 0, 0, src_row if real else 0
        if rows and run > 0:
            spans.append(_merged(Span(src_at + src, dst_at + dst, run, src_row, dst_row, rows)))
        src_at += rows * src_row
        dst_at += rows * dst_row
    return Slice(src_at, dst_at, tuple(spans)) if spans else None


def pairs(
    groups: Sequence[LayoutGroup], page_size: int, prefill: Shape, decode: Shape, dp: tuple[int, int]
) -> tuple[tuple[Rank, Rank], ...]:
    """The (prefill rank, decode rank) pairs between which pages move, for this pair of dp ranks; dummies are left
    out. Context and pipeline parallel ranks are the first ones: workers here run no others."""
    return tuple(
        (Rank(dp=dp[0], tp=source), Rank(dp=dp[1], tp=target))
        for target in range(decode.tp)
        for source in range(prefill.tp)
        if slice_between(groups, page_size, (source, prefill.tp), (target, decode.tp))
    )


def _rows(group: LayoutGroup, page_size: int) -> int:
    return len(group.layers) * group.parts * page_size


def _row_part(group: LayoutGroup, rank: int, ranks: int) -> int:
    """Bytes of one part of one token's row on this rank."""
    part = group.row_bytes // group.parts
    return part // group.heads * len(heads_of(group.heads, rank, ranks)) if group.heads else part


def _merged(span: Span) -> Span:
    """One long run where the runs touch on both sides."""
    if span.run == span.src_step == span.dst_step:
        size = span.run * span.count
        return Span(span.src, span.dst, size, size, size, 1)
    return span
