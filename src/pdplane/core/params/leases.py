"""Decode's care for what prefills hold for it: one RENEW per peer and interval, from the control thread, answered.

A long step of the engine never starves it, and an answer that does not name a hold means that it is over there for
good: a renewal revives nothing. While an answer is outstanding no second question is asked; a session that is lost
takes both with it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..errors import Cause
from ..frames import Frame, Renew, Renewed
from ..ids import HoldNo, Instance, Link
from ..node import Node

RENEWALS = 6  # per lease
SHORTEST_S = 0.05


class Leases:
    """`link_to` finds a session with this instance that is up."""

    def __init__(
        self,
        node: Node,
        instance: Instance,
        link_to: Callable[[Instance], Link | None],
        send: Callable[[Link, Frame], bool],
    ) -> None:
        self._node = node
        self._instance = instance
        self._link_to, self._send = link_to, send
        self._kept: dict[Instance, dict[HoldNo, float]] = {}
        self._asked: dict[Instance, tuple[Link, frozenset[HoldNo]]] = {}  # outstanding, and where

    def keep(self, holder: Instance, hold: HoldNo, lease_s: float) -> None:
        """Renew it from now on, a sixth of `lease_s` at a time."""
        self._kept.setdefault(holder, {})[hold] = lease_s
        due, soon = self._node.timers.when(("renew", holder)), self._node.now + _interval(lease_s)
        self._node.timers.set(("renew", holder), soon if due is None else min(due, soon))

    def drop(self, holder: Instance, hold: HoldNo) -> None:
        kept = self._kept.get(holder)
        if kept is None or kept.pop(hold, None) is None:
            return
        if not kept:
            del self._kept[holder]
            self._node.timers.clear(("renew", holder))

    def due(self, holder: Instance) -> None:
        """Its interval has passed."""
        kept = self._kept.get(holder)
        if not kept:
            return
        self._node.timers.set(("renew", holder), self._node.now + min(map(_interval, kept.values())))
        if holder not in self._asked:
            self._ask(holder)

    def session_up(self, link: Link) -> None:
        """What was asked on this session before it broke may never have arrived."""
        holder = link.there.instance
        if holder in self._asked and self._asked[holder][0] == link:
            del self._asked[holder]
        if holder not in self._asked and self._kept.get(holder):
            self._ask(holder)

    def answered(self, link: Link, frame: Renewed) -> dict[HoldNo, Cause]:
        """Those of the outstanding question that are held for us no more, and why."""
        where, asked = self._asked.get(frame.src, (None, frozenset()))
        if where != link:
            self._node.count("late", "renewed")
            return {}
        del self._asked[frame.src]
        kept = self._kept.get(frame.src, {})
        why = {} if frame.why is msgspec.UNSET else frame.why
        return {
            hold: why.get(hold, _over(frame.src, hold)) for hold in sorted(asked - set(frame.holds)) if hold in kept
        }

    def peer_gone(self, holder: Instance) -> None:
        self._kept.pop(holder, None)
        self._asked.pop(holder, None)
        self._node.timers.clear(("renew", holder))

    def _ask(self, holder: Instance) -> None:
        link = self._link_to(holder)
        if link is None:
            return
        holds = frozenset(self._kept[holder])
        frame = Renew(src=self._instance, dst=holder, rank=link.there.rank, holds=tuple(sorted(holds)))
        if self._send(link, frame):
            self._asked[holder] = link, holds


def _over(holder: Instance, hold: HoldNo) -> Cause:
    text = f"prefill {holder} does not hold {hold} any more: its lease has ended, or somebody has read it"
    return Cause("expired", text, 409, retryable=True, side="prefill")


def _interval(lease_s: float) -> float:
    return max(SHORTEST_S, lease_s / RENEWALS)
