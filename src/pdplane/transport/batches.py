"""What one link has been asked to move: batches that wait, and frames that were sent and wait for their acks. Every
batch completes exactly once, however it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pdplane.core.ids import GrantNo, MoveNo
from pdplane.core.slices import Slice

from .contract import PAGES_PER_FRAME, Pairs
from .landing_table import Verdict
from .tcp_frames import BadData

MAX_PAGE = 2**32 - 1
"""A page number is four bytes on the wire."""


def pages_per_frame(slice_: Slice, frame_bytes: int) -> int:
    return min(PAGES_PER_FRAME, max(1, frame_bytes // slice_.size_bytes))


class Batch:
    """One move. The pairs from `begun` on are not on their way yet; `unacked` counts the frames that are and have no
    ack."""

    __slots__ = ("begun", "error", "grant", "number", "pairs", "unacked")

    def __init__(self, number: MoveNo, grant: GrantNo, pairs: Pairs) -> None:
        self.number = number
        self.grant = grant
        self.pairs = pairs
        self.begun = 0
        self.unacked = 0
        self.error = ""

    @property
    def all_begun(self) -> bool:
        return self.begun >= len(self.pairs)


class Batches:
    """In order. `complete` is called once for each batch."""

    def __init__(self, complete: Callable[[MoveNo, str], None], pages_per_frame: int) -> None:
        self._complete = complete
        self._pages_per_frame = pages_per_frame
        self._waiting: deque[Batch] = deque()
        self._unacked: deque[Batch] = deque()  # of frames begun, in the order of their seq
        self._acked = 0

    @property
    def in_flight(self) -> int:
        return len(self._unacked)

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def post(self, batch: Batch) -> None:
        self._waiting.append(batch)

    def head(self) -> tuple[int, GrantNo, Pairs] | None:
        """(seq, grant, pairs) of the frame that is next."""
        while self._waiting:
            batch = self._waiting[0]
            pairs = batch.pairs[batch.begun : batch.begun + self._pages_per_frame]
            if 0 <= min(pairs.dst) <= max(pairs.dst) <= MAX_PAGE:
                return self._acked + len(self._unacked) + 1, batch.grant, pairs
            self._discard(batch, Verdict.NOT_GRANTED)
        return None

    def begin(self) -> None:
        """The head is on its way."""
        batch = self._waiting[0]
        batch.begun += self._pages_per_frame
        batch.unacked += 1
        self._unacked.append(batch)
        if batch.all_begun:
            self._waiting.popleft()

    def acked(self, seq: int, verdict: Verdict) -> None:
        if not self._unacked or seq != self._acked + 1:
            raise BadData(f"ack {seq} where {self._acked + 1} of {self._acked + len(self._unacked)} is due")
        self._acked = seq
        batch = self._unacked.popleft()
        batch.unacked -= 1
        if verdict is Verdict.LANDED:
            self._complete_if_over(batch)
        else:
            self._discard(batch, verdict)

    def cancel(self, grant: GrantNo) -> None:
        dropped = dict.fromkeys(batch for batch in self._waiting if batch.grant == grant and not batch.begun)
        self._waiting = deque(batch for batch in self._waiting if batch not in dropped)
        for batch in dropped:
            self._complete(batch.number, "cancelled")

    def fail(self, error: str) -> None:
        """Everything outstanding ends; the next connection begins to count anew."""
        outstanding = list(dict.fromkeys((*self._unacked, *self._waiting)))
        self._waiting.clear()
        self._unacked.clear()
        self._acked = 0
        for batch in outstanding:
            self._complete(batch.number, batch.error or error)

    def _discard(self, batch: Batch, verdict: Verdict) -> None:
        """What has not begun of a discarded move would be discarded too."""
        batch.error = batch.error or f"discarded: {verdict}"
        if not batch.all_begun:
            batch.begun = len(batch.pairs)
            self._waiting.remove(batch)
        self._complete_if_over(batch)

    def _complete_if_over(self, batch: Batch) -> None:
        if batch.all_begun and not batch.unacked:
            self._complete(batch.number, batch.error)
