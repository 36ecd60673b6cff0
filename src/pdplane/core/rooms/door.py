"""Decode's door: rooms that wait for their pages, and finished hand-offs that wait for a place in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..batch import Batch, Running
from ..effects import RunDecode
from ..ids import GrantNo, Room
from ..node import Node
from ..pages import Page
from ..prompt_pages import PromptPages
from ..queues import AdmissionQueue
from ..reserve import Reserve
from .receiver import Receiver
from .table import RE


class Door:
    """`harvest` before `admit`: what is finished goes on before anything new is let in, also while requests are laid
    aside (I14)."""

    def __init__(self, node: Node, pages: PromptPages, reserve: Reserve, batch: Batch) -> None:
        self._node, self._pages, self._reserve, self._batch = node, pages, reserve, batch
        self._waiting: AdmissionQueue[Receiver] = AdmissionQueue(node.limits.max_overtakes)
        self._arrived: dict[Room, Receiver] = {}

    def push(self, receiver: Receiver) -> None:
        """It waits for pages from now on."""
        self._waiting.push(receiver, receiver.leg.priority)

    def arrived(self, receiver: Receiver) -> None:
        """Its hand-off is complete."""
        self._arrived[receiver.room] = receiver
        self._reserve.completed(receiver.owner)

    def forget(self, receiver: Receiver) -> None:
        self._waiting.remove(receiver)
        self._arrived.pop(receiver.room, None)

    @property
    def arrivals(self) -> int:
        return len(self._arrived)

    def admit(self, next_grant: Callable[[], GrantNo]) -> Iterator[Receiver]:
        """All pages of a prompt, or none, beside what is kept free for growth (core/reserve.py): what the cache has of
        them is held from here on. Each receiver comes with its grant and pages, and is to be told PAGES_OK before the
        next one is asked for."""
        while len(self._reserve) < 2 * self._node.limits.max_running:
            receiver = self._waiting.pop_fitting(self._fits, self._batch.stamp)
            if receiver is None:
                return
            need, receiver.grant = receiver.need, next_grant()
            self._reserve.admit(receiver.owner, need.pages, need.most)
            receiver.take(self._pages.take(receiver.prompt, Page.GRANTED, receiver.owner))
            yield receiver

    def harvest(self) -> None:
        """Finished hand-offs: answered where the row ends them, else into the batch while it has a place. Who comes to
        the batch may want a page at once, or be the one to give way, and who ends here gives pages back, for which
        somebody may starve with no event due: growth is looked at again."""
        size, available = len(self._batch), self._pages.available
        for receiver in list(self._arrived.values()):
            row = receiver.row
            assert row is not None
            if row.finish_reason is not None:
                receiver.apply(RE.ROW_ENDS)
            elif not self._batch.full:
                self._run(receiver)
        if len(self._batch) > size or self._pages.available > available:
            self._batch.grow()
            self._batch.restore()

    def _fits(self, receiver: Receiver) -> bool:
        return self._batch.may_admit(receiver.prompt, receiver.need.most, receiver.leg.priority)

    def _run(self, receiver: Receiver) -> None:
        assert receiver.row is not None
        leg, need = receiver.leg, receiver.need
        request = Running(
            rid=receiver.rid,
            room=receiver.room,
            owner=receiver.owner,
            pages=[*receiver.shared, *receiver.pages],
            most=need.most,
            tokens=leg.prompt.tokens,
            arrived_at=receiver.arrived_at,
            priority=leg.priority,
            shared=len(receiver.shared),
            page_keys=leg.page_keys,
            whole=True,
        )
        receiver.apply(RE.BATCH)
        self._node.out.append(RunDecode(request.rid, tuple(request.pages), receiver.row, need.max_new))
        self._batch.start(request, leg.deadline)
