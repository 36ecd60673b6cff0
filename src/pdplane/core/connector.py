"""The connector contract of the params dialect: what stands between a scheduler and wherever KV comes from.

The hooks are those of vLLM's KVConnectorBase_V1, under its names and in its order. A connector has two halves. The
scheduler's half lives in the core, decides, and never acts: what is to be done it returns from `build_connector_meta`,
as effects. The worker's half does what `ConnectorWork` brings it, with the pools in its hands, on each rank, and
reports.

In which order a scheduler calls, for one request at decode::

    on_new_request
    get_num_new_matched_tokens   again and again while it says None; nothing is allocated before it has said a number,
                                 and once more, with the local hits, when the pages are taken
    update_state_after_alloc     once, with all of the prompt's pages (all of them, or the request waits)
    build_connector_meta         at the end of every turn
    ... finished_recving         the load touches the pages no more: the engine may run
    ... confirmed                with it or later: what was loaded is right. Only now are pages hashed, and only now
                                 does a byte of the answer leave
    request_finished             exactly once, whatever the end, before a page that a load may touch is freed

and at prefill `on_new_request`, then `request_finished` exactly once: delay_free keeps the pages until the id is in
`finished_sending`.

A load that fails is named in `failed_recving` (nothing of it is trusted) or by its pages in `invalid_block_ids` (those
before the first bad one are good, if the load is confirmed), and in `finished_recving` in either case, when nothing of
it touches the pages any more. One that is all right is in `confirmed` too; one that failed need not be. A load may be
over before it has begun: where no prefill is to be found, say. And it may turn out wrong when it is over: as long as it
is not confirmed, `failed_recving` takes the engine back.

What has finished is taken in one order: confirmations (not of what has failed) and failures first, then bad pages, then
who has finished (so that a failed load is ended before its pages are freed by the same report). What is said of a
request twice, or of one that is not known here, is counted late and changes nothing.

Ours are in hold_connector.py and pull_connector.py; one over files, and a checker of all this, in tests/connectors.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Protocol

import msgspec

from .effects import ConnectorWork, Effect
from .errors import Cause
from .events import Event, Handle, KVOutput, RequestArrived
from .ids import PageId, Rank, Rid


class Matched(msgspec.Struct, frozen=True):
    """tokens: how many more than the local ones can be had, None to be asked again later. waits: they come
    asynchronously, so that the request parks. Here all loads do: True where there are any, and never where there are
    none."""

    tokens: int | None
    waits: bool = False


class Finished(msgspec.Struct, frozen=True):
    """delay_free: the pages stay until `finished_sending` names the request. handle: what its client is answered."""

    delay_free: bool = False
    lease_s: float = 0.0
    hold: int = 0


class KVConnector(Protocol):
    """The scheduler's half. All calls come from the core, one at a time; none blocks."""

    def on_new_request(self, request: RequestArrived) -> None:
        """It has been let in. Bookkeeping, leases."""

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        """How many tokens beyond `num_computed_tokens` (whole pages that are here already) can be loaded. Without side
        effects, and says the same until something happens."""
        ...

    def update_state_after_alloc(
        self, request: RequestArrived, blocks: Sequence[PageId], num_external_tokens: int
    ) -> None:
        """The prompt's pages are reserved: `blocks` are all of them behind those that are here already, and the load is
        to fill the first ones, up to `num_external_tokens`. Where that is 0 nothing will be loaded, and whoever holds
        it may let go."""

    def build_connector_meta(self) -> Sequence[Effect]:
        """What is to be done since the last call; taken out."""
        ...

    def update_connector_output(self, output: KVOutput) -> None:
        """What all ranks have finished, before the scheduler acts on it."""

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        """Its end, of whatever kind. Prefill: `blocks` are the prompt's pages where it was computed whole, () where
        there is nothing to keep. Decode: `blocks` are those of its load, () once it has run; while a load of it runs
        delay_free, and the load's end is reported."""
        ...

    # What vLLM's connectors do on threads and sockets of their own comes to ours as events and clocks of the core.

    def take_event(self, event: Event) -> None:
        """An event of the core that is none of the scheduler's."""

    def tick(self) -> float | None:
        """Every turn: its own clocks. When it wants the next turn at the latest."""
        ...

    def due(self, kind: str, name: object) -> None:
        """A timer that it has set at the node has rung."""

    def take_ready(self) -> Sequence[Rid]:
        """Of whom `get_num_new_matched_tokens` may have something else to say since the last call."""
        ...

    def take_output(self) -> KVOutput:
        """What has finished since the last call, over all ranks, where the connector itself knows."""
        ...

    def refused(self, handle: Handle, cause: Cause) -> None:
        """Decode has turned away a request that brought it, before `on_new_request`: its holder may let go."""

    def taken(self, handle: Handle) -> Cause | None:
        """Why a request that brings this handle cannot have it: another one here has; None where it may."""
        ...

    def release(self, rid: Rid, cause: Cause) -> bool:
        """Prefill: nobody will come for this one. False where nothing is kept for it."""
        ...


class KVConnectorBase:
    """A KVConnector of one side that keeps nothing and loads nothing: each connector says what it does beyond that.
    `begin` is how it gives work to its worker halves."""

    def __init__(self) -> None:
        self._work: list[Effect] = []

    def begin(self, work: object) -> None:
        """On every rank, at the end of this turn."""
        self._work.append(ConnectorWork(work))

    def on_new_request(self, request: RequestArrived) -> None:
        pass

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        return Matched(0)

    def update_state_after_alloc(
        self, request: RequestArrived, blocks: Sequence[PageId], num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self) -> Sequence[Effect]:
        work, self._work = self._work, []
        return work

    def update_connector_output(self, output: KVOutput) -> None:
        pass

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        return Finished()

    def take_event(self, event: Event) -> None:
        pass

    def tick(self) -> float | None:
        return None

    def due(self, kind: str, name: object) -> None:
        pass

    def take_ready(self) -> Sequence[Rid]:
        return ()

    def take_output(self) -> KVOutput:
        return KVOutput()

    def refused(self, handle: Handle, cause: Cause) -> None:
        pass

    def taken(self, handle: Handle) -> Cause | None:
        return None

    def release(self, rid: Rid, cause: Cause) -> bool:
        return False


class WorkerConnector(Protocol):
    """The worker's half on one rank. One thread calls it; loads run on their own."""

    def register_kv_caches(self, pools: Sequence[memoryview | None], pages: int, page_bytes: Sequence[int]) -> None:
        """Once, before anything else: the pools of this rank's group."""

    def start_load_kv(self, work: object) -> None:
        """Begin what a `ConnectorWork` says, at decode a load, at prefill a save. Must not block. What it cannot even
        begin is reported as failed, not raised."""

    def get_transfer_results(self) -> KVOutput:
        """What has finished since the last call. An id that failed is in finished_recving too."""
        ...


class RankOutputs:
    """What ranks report, made one: by who has reported, never by how many. A rank that reports twice counts once, one
    that does not belong here counts not at all, and one that never reports keeps its request waiting (whose deadline
    ends it).

    A failure said by any rank stands until all have said that they are over: pages are only touched no more then. One
    that is said when they have (what was loaded turns out to be wrong) passes at once; whichever it is, nothing of
    that load is confirmed any more. `live`: whom the scheduler knows. What is said of others passes at once, for it to
    count; nothing of it is kept.
    """

    def __init__(self, ranks: Iterable[Rank], live: Container[Rid]) -> None:
        self._ranks = frozenset(ranks)
        self._live = live
        self._sent: dict[Rid, set[Rank]] = {}
        self._received: dict[Rid, set[Rank]] = {}
        self._confirmed: dict[Rid, set[Rank]] = {}
        self._failed: dict[Rid, Cause] = {}
        self._loaded: set[Rid] = set()  # of whom all ranks have said that they are over

    def add(self, rank: Rank, output: KVOutput) -> KVOutput:
        """What is complete over all ranks now."""
        if rank not in self._ranks:
            return KVOutput()
        late = self._failures(output)
        whole = KVOutput(
            invalid_block_ids=set(output.invalid_block_ids),
            finished_sending=self._complete(self._sent, rank, output.finished_sending),
            finished_recving=self._complete(self._received, rank, output.finished_recving),
            failed_recving=late,
        )
        self._loaded |= {rid for rid in whole.finished_recving if rid in self._live}
        for rid in sorted(whole.finished_recving & self._failed.keys()):
            whole.failed_recving[rid] = self._failed[rid]
        whole.confirmed = self._complete(self._confirmed, rank, output.confirmed - self._failed.keys())
        return whole

    def forget(self, rid: Rid) -> None:
        """The request is over: what is said of it later begins anew."""
        for seen in (self._sent, self._received, self._confirmed):
            seen.pop(rid, None)
        self._failed.pop(rid, None)
        self._loaded.discard(rid)

    def _failures(self, output: KVOutput) -> dict[Rid, Cause]:
        """The first one of each load is kept; returns those of loads that are over."""
        late = {}
        for rid, cause in output.failed_recving.items():
            if rid not in self._live:
                late[rid] = cause
            elif rid not in self._failed:
                self._failed[rid] = cause
                if rid in self._loaded:
                    late[rid] = cause
        return late

    def _complete(self, seen: dict[Rid, set[Rank]], rank: Rank, rids: set[Rid]) -> set[Rid]:
        over = set()
        for rid in rids:
            if rid not in self._live:
                over.add(rid)
                continue
            ranks = seen.setdefault(rid, set())
            ranks.add(rank)
            if ranks == self._ranks:
                del seen[rid]
                over.add(rid)
        return over
