"""What a page holds in a simulated run: marks that say whose it is, split over ranks as real KV heads are.

A page has PAGE_SIZE token rows of HEADS heads; each head's mark is cut over the rows, so that a page, a head or a row
in the wrong place is seen. Full pages of a prompt are marked by the prompt, since requests with the same prefix share
them; all others by their attempt.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import msgspec

from pdplane.core.ids import Rid, Room
from pdplane.core.layout import LayoutGroup
from pdplane.core.slices import heads_of

MARK = struct.Struct(">QII")
PAGE_SIZE = 4
HEADS = 3  # over four ranks, one holds nothing
CHUNK_BYTES = MARK.size // PAGE_SIZE
GROUP = LayoutGroup("kv", HEADS * CHUNK_BYTES, (0,), "mark", parts=1, heads=HEADS)
PAGE_BYTES = MARK.size * HEADS
_OF_FAMILY, _OF_PROMPT = 1 << 63, 1 << 62


class Work(msgspec.Struct, frozen=True):
    """What the simulation knows of a leg and the core does not: `serial` is the attempt's, unlike any other's.

    The first `family_tokens` tokens of the prompt are those of every prompt of its `family`. `marked_by_prompt`: where
    prefixes are shared."""

    rid: Rid
    room: Room
    serial: int
    prompt_tokens: int
    max_new: int
    stops_at: int
    breaks_here: bool = False
    prompt: int = 0
    family: int = 0
    family_tokens: int = 0
    marked_by_prompt: bool = False

    @property
    def page_keys(self) -> tuple[bytes, ...]:
        """One key per full page of the prompt, for the prefix cache."""
        full = self.prompt_tokens // PAGE_SIZE if self.marked_by_prompt else 0
        return tuple(b"%d/%d/%d" % (*self._whose(index), index) for index in range(full))

    def tag(self, index: int, rank: int = 0, ranks: int = 1) -> bytes:
        """What page `index` of this attempt holds on that tensor parallel rank when it is written."""
        return _content(*self._whose(index), index, rank, ranks)

    def _whose(self, index: int) -> tuple[int, int]:
        end = (index + 1) * PAGE_SIZE
        if not self.marked_by_prompt or end > self.prompt_tokens:
            return self.room, self.serial
        if end <= self.family_tokens:
            return _OF_FAMILY | self.family, 0
        return _OF_PROMPT | self.prompt, 0


@lru_cache(maxsize=65_536)
def _content(whose: int, serial: int, index: int, rank: int, ranks: int) -> bytes:
    marks = [MARK.pack(whose, serial, index * HEADS + head) for head in heads_of(HEADS, rank, ranks)]
    rows = range(0, MARK.size, CHUNK_BYTES)
    return b"".join(mark[row : row + CHUNK_BYTES] for row in rows for mark in marks)
