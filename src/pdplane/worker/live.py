"""Which requests the engine's thread answers for, and what an abort of each may do at once. One lock: callers' threads
come here, and the engine's.

A rid is live from its add to its release. In the inbox it is unseen: nobody has touched its pages. Then the engine has
it, and an abort is a mark that the step after looks for. While the engine's thread has it in its hands, to lay it aside
or to put it back, an abort is carried out when it is put down.
"""

from __future__ import annotations

import threading
from enum import Enum, auto

from pdplane.core.ids import Rid


class Abort(Enum):
    """What came of an abort."""

    NOT_LIVE = auto()
    UNSEEN = auto()  # it is live no more, and its release is the caller's to say
    IN_HAND = auto()
    WITH_ENGINE = auto()


class Live:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[Rid] = set()
        self._unseen: set[Rid] = set()
        self._aborted: set[Rid] = set()
        self._in_hand: Rid | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._live)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def any_aborted(self) -> bool:
        return bool(self._aborted)

    # --- from any thread ---

    def add(self, rid: Rid) -> None:
        """Raises ValueError where it is live already, RuntimeError once closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine thread is stopping")
            if rid in self._live:
                raise ValueError(f"rid {rid!r} is already running")
            self._live.add(rid)
            self._unseen.add(rid)

    def abort(self, rid: Rid) -> Abort:
        with self._lock:
            if rid not in self._live:
                return Abort.NOT_LIVE
            if rid in self._unseen:
                self._drop(rid)
                return Abort.UNSEEN
            self._aborted.add(rid)
            return Abort.IN_HAND if rid == self._in_hand else Abort.WITH_ENGINE

    def drop(self, rid: Rid) -> None:
        with self._lock:
            self._drop(rid)

    def close(self) -> None:
        with self._lock:
            self._closed = True

    # --- on the engine's thread ---

    def see(self, rid: Rid) -> bool:
        """The engine is about to have it; False where it was aborted or given up in the inbox."""
        with self._lock:
            seen = rid in self._unseen
            self._unseen.discard(rid)
            return seen

    def aborted(self, rid: Rid) -> bool:
        with self._lock:
            return rid in self._aborted

    def pick_up(self, rid: Rid) -> bool:
        """Until it is put down nobody else ends it. False where its end has come, or its abort is on its way."""
        with self._lock:
            if rid not in self._live or rid in self._unseen or rid in self._aborted:
                return False
            self._in_hand = rid
            return True

    def put_down(self) -> Rid | None:
        """What was in hand, if it was aborted meanwhile."""
        with self._lock:
            rid, self._in_hand = self._in_hand, None
            return rid if rid in self._aborted else None

    def give_up(self) -> list[Rid]:
        """Nothing is live any more: what was."""
        with self._lock:
            rids = sorted(self._live)
            self._live, self._unseen, self._aborted, self._in_hand = set(), set(), set(), None
            return rids

    def _drop(self, rid: Rid) -> None:
        self._live.discard(rid)
        self._unseen.discard(rid)
        self._aborted.discard(rid)
