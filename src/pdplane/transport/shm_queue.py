"""What one link has been asked to move: batches that wait, and frames that were sent and wait for their acks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pdplane.core.ids import GrantNo, MoveNo

from .contract import Pair
from .landing_table import Verdict
from .tcp_frames import BadData

Frame = tuple[Pair, ...]


class Batch:
    """One move. `frames` are not begun yet; `unacked` counts those that are and have no ack."""

    __slots__ = ("begun", "error", "frames", "grant", "number", "unacked")

    def __init__(self, number: MoveNo, grant: GrantNo, pairs: Sequence[Pair], pages_per_frame: int) -> None:
        self.number = number
        self.grant = grant
        starts = range(0, len(pairs), pages_per_frame)
        self.frames = deque(tuple(pairs[start : start + pages_per_frame]) for start in starts)
        self.begun = False
        self.unacked = 0
        self.error = ""


class Batches:
    """In order. `complete` is called once for each batch."""

    def __init__(self, complete: Callable[[MoveNo, str], None]) -> None:
        self._complete = complete
        self._waiting: deque[Batch] = deque()
        self._unacked: deque[Batch] = deque()  # of frames begun, in the order of their seq
        self._acked = 0

    @property
    def in_flight(self) -> int:
        return len(self._unacked)

    def post(self, batch: Batch) -> None:
        self._waiting.append(batch)

    def head(self) -> tuple[int, GrantNo, Frame] | None:
        """(seq, grant, pairs) of the frame that is next."""
        if not self._waiting:
            return None
        batch = self._waiting[0]
        return self._acked + len(self._unacked) + 1, batch.grant, batch.frames[0]

    def begin(self) -> None:
        """The head is on its way."""
        batch = self._waiting[0]
        batch.frames.popleft()
        if not batch.frames:
            self._waiting.popleft()
        batch.begun = True
        batch.unacked += 1
        self._unacked.append(batch)

    def acked(self, seq: int, verdict: Verdict) -> None:
        if not self._unacked or seq != self._acked + 1:
            raise BadData(f"ack {seq} where {self._acked + 1} of {self._acked + len(self._unacked)} is due")
        self._acked = seq
        batch = self._unacked.popleft()
        batch.unacked -= 1
        if verdict is not Verdict.LANDED:
            batch.error = batch.error or f"discarded: {verdict}"
            self._drop_rest(batch)
        if not batch.unacked and not batch.frames:
            self._complete(batch.number, batch.error)

    def cancel(self, grant: GrantNo) -> None:
        dropped = [batch for batch in self._waiting if batch.grant == grant and not batch.begun]
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

    def _drop_rest(self, batch: Batch) -> None:
        """What has not begun of a discarded move would be discarded too."""
        if batch.frames:
            batch.frames.clear()
            self._waiting.remove(batch)
