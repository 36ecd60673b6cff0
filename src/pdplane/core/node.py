"""What the three roles share: an outbox of effects, clocks, notes for the record, and the audit.

`handle(event, now)` is the one entry; it returns the effects in the order in which they are to be carried out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from .deadlines import Timers
from .effects import Alarm, AnswerFailed, Count, Effect, Note
from .errors import Cause
from .events import Event, Tick
from .ids import Rid, Room
from .pages import Ledger
from .session import SessionTimes

TimerKey = tuple[str, object]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a role's core can be told; seconds and pages. Defaults are DESIGN section 14's."""

    pages: int
    page_size: int = 16
    max_running: int = 16  # requests in the engine at once (decode, aggregated) or prompts (prefill: credits)
    queue_limit_s: float = 60.0  # waiting for pages or a place, then 429
    peer_wait_s: float = 10.0  # a leg without grant's announcement, a grant without leg, an owed abort
    progress_limit_s: float = 60.0  # granted, and no sign of work
    drain_limit_s: float = 30.0
    row_ttl_s: float = 30.0
    hold_term_s: float = 30.0  # how long computed KV waits for decode (params: the lease, from each renewal anew)
    recompute: bool = False  # params: decode computes itself what could not be read (kv_load_failure_policy)
    held_pages: int = 0  # prefill_complete: most pages computed ahead of a grant; 0: half of the pool
    prefix_cache: bool = True  # keep the full pages of prompts: what prefill has sent, what decode was handed
    reserve_tokens: int = (
        512  # decode: growth kept free for each request at admission; beyond it, requests are retracted
    )
    tombstone_s: float = 310.0
    max_overtakes: int = 8
    max_queue: int = 1024
    session: SessionTimes = SessionTimes()


class Node(ABC):
    """One role's core. Subclasses say what each event does."""

    side = ""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ledger = Ledger(limits.pages)
        self.now = 0.0
        self.out: list[Effect] = []
        self.timers: Timers[TimerKey] = Timers()
        self.draining = ""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """The effects of `event`, in order. Time never runs backwards here."""
        self.now = max(self.now, now)
        if isinstance(event, Tick):
            while (key := self.timers.pop_due(self.now)) is not None:
                self._due(key)
        else:
            self._event(event)
        self._after()
        # The outbox is drained in place: the sessions append to the same list.
        effects = self.out[:]
        self.out.clear()
        return effects

    def next_due(self) -> float | None:
        """When `handle(Tick())` is wanted next."""
        return self.timers.next_due()

    @abstractmethod
    def _event(self, event: Event) -> None: ...

    @abstractmethod
    def _due(self, key: TimerKey) -> None: ...

    @abstractmethod
    def _after(self) -> None:
        """What every event may have made possible: growth, admission, session clocks."""

    @property
    @abstractmethod
    def live(self) -> int:
        """Requests that are not over; 0 means idle."""

    def audit(self) -> list[str]:
        """Faults of conservation; a served process alarms on any."""
        return self.ledger.audit()

    def audit_all(self) -> list[str]:
        """The same with every page walked, for tests and the simulator."""
        return self.ledger.audit_all()

    # --- for the machines of this node --------------------------------------------------------------------------

    def note(self, rid: Rid, room: Room | None, state: str, detail: str = "") -> None:
        self.out.append(Note(rid, room, state, detail))

    def count(self, name: str, label: str = "") -> None:
        self.out.append(Count(name, label))

    def alarm(self, text: str) -> None:
        self.out.append(Alarm(text))

    def answer_failed(self, rid: Rid, room: Room | None, cause: Cause) -> None:
        self.out.append(AnswerFailed(rid, cause))
        self.note(rid, room, "answered", str(cause))
