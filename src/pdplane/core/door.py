"""Decode's door: rooms that wait for their pages, and finished hand-offs that wait for a place in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .batch import Batch, Running
from .effects import RunDecode
from .ids import GrantNo, Room
from .node import Node
from .pages import Page
from .queues import AdmissionQueue
from .receiver import Receiver
from .reserve import Reserve
from .table import RE


class Door:
    """`harvest` before `admit`: what is finished goes on before anything new is let in (I14)."""

    def __init__(self, node: Node, reserve: Reserve, batch: Batch) -> None:
        self._node, self._reserve, self._batch = node, reserve, batch
        self._waiting: AdmissionQueue[Receiver] = AdmissionQueue(node.limits.max_overtakes)
        self._arrived: dict[Room, Receiver] = {}

    def push(self, receiver: Receiver) -> None:
        """It waits for pages from now on."""
        self._waiting.push(receiver, receiver.leg.priority)

    def arrived(self, receiver: Receiver) -> None:
        """Its hand-off is complete."""
        self._arrived[receiver.room] = receiver

    def forget(self, receiver: Receiver) -> None:
        self._waiting.remove(receiver)
        self._arrived.pop(receiver.room, None)

    @property
    def arrivals(self) -> int:
        return len(self._arrived)

    def admit(self, next_grant: Callable[[], GrantNo]) -> Iterator[Receiver]:
        """All pages of a prompt on every rank, or none; room to grow to the end is spoken for (core/reserve.py). Each
        receiver comes with its grant and pages, and is to be told PAGES_OK before the next one is asked for."""
        while len(self._reserve) < 2 * self._node.limits.max_running:
            receiver = self._waiting.pop_fitting(self._fits, self._reserve.stamp)
            if receiver is None:
                return
            need, receiver.grant = receiver.need, next_grant()
            self._reserve.admit(receiver.owner, need.pages, need.most)
            receiver.take(self._node.ledger.take(need.pages, Page.GRANTED, receiver.owner))
            yield receiver

    def harvest(self) -> None:
        """Finished hand-offs: answered where the row ends them, else into the batch while it has a place."""
        for receiver in list(self._arrived.values()):
            row = receiver.row
            assert row is not None
            if row.finish_reason is not None:
                receiver.apply(RE.ROW_ENDS)
            elif not self._batch.full and self._reserve.may_run(receiver.owner):
                self._run(receiver)

    def _fits(self, receiver: Receiver) -> bool:
        return self._reserve.may_admit(receiver.need.pages, receiver.need.most)

    def _run(self, receiver: Receiver) -> None:
        assert receiver.row is not None
        need, pages, owner = receiver.need, receiver.pages, receiver.owner
        receiver.apply(RE.BATCH)
        self._node.out.append(RunDecode(receiver.rid, pages, receiver.row, need.max_new))
        tokens = receiver.leg.prompt.tokens
        request = Running(receiver.rid, receiver.room, owner, list(pages), need.most, tokens, receiver.arrived_at)
        self._batch.start(request, receiver.leg.deadline)
