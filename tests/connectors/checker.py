"""The contract of core/connector.py, checked from outside: put around any scheduler's half, on either side.

A breach, be it the scheduler's or the connector's, is an AssertionError in the call that shows it; `settled` says what
is still owed when all is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdplane.core.connector import Finished, KVConnector, Matched
from pdplane.core.effects import Effect
from pdplane.core.errors import Cause
from pdplane.core.events import Event, Handle, KVOutput, RequestArrived
from pdplane.core.ids import PageId, Rid
from pdplane.core.layout import pages_for
from pdplane.core.node import Node
from pdplane.core.pages import Page

NOT_SHARED = {Page.GRANTED, Page.DRAINING, Page.QUARANTINED}


class Seen(msgspec.Struct):
    """One request, as the hooks tell of it."""

    request: RequestArrived
    said: Matched | None = None  # the last answer of get_num_new_matched_tokens
    computed: int = 0  # and what it was asked with
    blocks: tuple[PageId, ...] | None = None  # of its load
    received: bool = False
    confirmed: bool = False
    finished: bool = False
    kept: bool = False  # delay_free


class Checked:
    """`inner` under watch; `node`: whose it is. `names`: every call so far, in order."""

    def __init__(self, node: Node, inner: KVConnector) -> None:
        self.node, self.inner = node, inner
        self.names: list[tuple[str, Rid]] = []
        self.seen: dict[Rid, Seen] = {}

    # --- the scheduler's calls --------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestArrived) -> None:
        self._note("on_new_request", request.rid)
        before = self.seen.get(request.rid)
        assert before is None or before.finished, f"{request.rid} came twice"
        self.seen[request.rid] = Seen(request)
        self.inner.on_new_request(request)

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        """Asked twice, answered alike, and nothing has happened."""
        self._note("get_num_new_matched_tokens", request.rid)
        seen, size = self._live(request), self.node.limits.page_size
        assert seen.blocks is None, f"{request.rid} has its pages and is asked again"
        assert num_computed_tokens % size == 0
        asked = len(self.node.out)
        said = self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        again = self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        assert said == again, f"asked again it says {again}, and not {said}"
        assert len(self.node.out) == asked, "a question has side effects"
        if said.tokens is None:
            assert not said.waits, "asked again later, it does not wait"
            assert num_computed_tokens == 0, f"{request.rid} has its pages and no answer"
        else:
            missing = request.prompt.tokens - num_computed_tokens
            assert 0 <= said.tokens <= missing, f"{said.tokens} tokens can be had of {missing}"
            assert said.waits == (said.tokens > 0), "where nothing comes, nobody waits"
        seen.said, seen.computed = said, num_computed_tokens
        return said

    def update_state_after_alloc(
        self, request: RequestArrived, blocks: Sequence[PageId], num_external_tokens: int
    ) -> None:
        """After a number, with all pages behind those that are there."""
        self._note("update_state_after_alloc", request.rid)
        seen, size = self._live(request), self.node.limits.page_size
        assert seen.blocks is None, f"the pages of {request.rid} came twice"
        assert seen.said is not None
        assert seen.said.tokens == num_external_tokens
        assert len(blocks) == pages_for(request.prompt.tokens, size) - seen.computed // size
        assert {self.node.ledger.state_of(page) for page in blocks} <= {Page.GRANTED}
        seen.blocks = tuple(blocks) if num_external_tokens else ()
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self) -> Sequence[Effect]:
        self._walk()
        made = self.inner.build_connector_meta()
        assert self.inner.build_connector_meta() == type(made)(), "what was taken out is said again"
        return made

    def update_connector_output(self, output: KVOutput) -> None:
        for rid in output.failed_recving:
            if seen := self._known(rid):
                assert rid in output.finished_recving or seen.received, f"{rid} failed, and its load is not over"
        for rid in output.finished_recving:
            self._received(rid)
        for rid in output.confirmed:
            if seen := self._known(rid):
                assert seen.received, f"{rid} is confirmed before its load is over"
                seen.confirmed = True
        for rid in output.finished_sending:
            if seen := self._known(rid):
                assert seen.finished, f"{rid} is said to be sent, and has not ended"
                assert seen.kept, f"{rid} is said to be sent, and nothing was kept of it"
                seen.kept = False
        self.inner.update_connector_output(output)
        self._walk()

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        """Exactly once."""
        self._note("request_finished", request.rid)
        seen = self._live(request)
        said = self.inner.request_finished(request, blocks)
        seen.finished, seen.kept = True, said.delay_free
        if self.node.side == "decode":
            assert not (said.delay_free and seen.received), f"the load of {request.rid} is over, and keeps its pages"
        elif not blocks:
            assert not said.delay_free, f"there is nothing of {request.rid} to keep"
        return said

    # --- the others pass --------------------------------------------------------------------------------------------

    def take_event(self, event: Event) -> None:
        self.inner.take_event(event)

    def tick(self) -> float | None:
        due = self.inner.tick()
        assert due is None or due > self.node.now, "it wants a turn that is over"
        return due

    def due(self, kind: str, name: object) -> None:
        self.inner.due(kind, name)

    def take_ready(self) -> Sequence[Rid]:
        return self.inner.take_ready()

    def take_output(self) -> KVOutput:
        return self.inner.take_output()

    def refused(self, handle: Handle, cause: Cause) -> None:
        self.inner.refused(handle, cause)

    def taken(self, handle: Handle) -> Cause | None:
        return self.inner.taken(handle)

    def release(self, rid: Rid, cause: Cause) -> bool:
        return self.inner.release(rid, cause)

    # --- what is seen -----------------------------------------------------------------------------------------------

    def settled(self) -> list[str]:
        """Requests that have not ended, and pages that are kept for ever."""
        open_ = [f"{rid} has not ended" for rid, seen in self.seen.items() if not seen.finished]
        return open_ + [f"the pages of {rid} are kept for ever" for rid, seen in self.seen.items() if seen.kept]

    def calls(self, rid: str) -> list[str]:
        """The hooks that were called for this request, a question said again once."""
        names = [name for name, of in self.names if of == rid]
        return [name for at, name in enumerate(names) if at == 0 or name != names[at - 1]]

    def _note(self, name: str, rid: Rid) -> None:
        self.names.append((name, rid))

    def _live(self, request: RequestArrived) -> Seen:
        seen = self.seen.get(request.rid)
        assert seen is not None, f"{request.rid} has not come"
        assert not seen.finished, f"{request.rid} has ended"
        return seen

    def _known(self, rid: Rid) -> Seen | None:
        """What is said of those that the scheduler does not know is its to count."""
        requests = self.node.requests  # type: ignore[attr-defined]
        return self.seen.get(rid) if rid in requests else None

    def _received(self, rid: Rid) -> None:
        seen = self._known(rid)
        if seen is None:
            return
        assert seen.said is not None, f"{rid} is said to be loaded, and has not been asked for"
        seen.received, seen.kept = True, False

    def _walk(self) -> None:
        """While a load runs its pages are nobody else's, and in no cache: not there, they are no prefix."""
        for rid, seen in self.seen.items():
            if not seen.blocks or seen.received or not self._known(rid):
                continue
            states = {self.node.ledger.state_of(page) for page in seen.blocks}
            assert states <= NOT_SHARED, f"the pages of {rid} are {states} while they are filled"
