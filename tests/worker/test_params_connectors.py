"""Workers around another connector than ours: its scheduler's half sits in the core, its worker's on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from pdplane.core.connector import Finished, Matched
from pdplane.core.effects import ConnectorWork, Effect
from pdplane.core.errors import Cause
from pdplane.core.events import Event, Handle, KVOutput, RequestArrived
from pdplane.core.ids import PageId, Rid
from pdplane.core.node import Node
from pdplane.worker import server
from pdplane.worker.config import WorkerConfig
from pdplane.worker.connectors import Plugged
from pdplane.worker.params_decode import ParamsDecodeShell
from pdplane.worker.params_prefill import ParamsPrefillShell
from pdplane.worker.shell import Parts

from .fleets import COMPLETIONS, completion, essence, texts, until
from .pairs import Pair, pair

BODY = completion()[1]
BROKEN = Cause("shelf_broken", "the shelf has fallen down", 502, retryable=True, side="decode")

Key = tuple[bytes, int]
"""(a prompt's digest, a rank)."""


class Job(msgspec.Struct, frozen=True):
    rid: Rid
    digest: bytes
    pages: tuple[PageId, ...]


class Shelf:
    """Where pages are kept, by prompt. `fails`: whatever is asked of it is not there."""

    def __init__(self) -> None:
        self.kept: dict[Key, list[bytes]] = {}
        self.fails = False


class Scheduling:
    """The half in the core that both sides share: what is to be done waits for the end of the turn."""

    def __init__(self, node: Node, shelf: Shelf) -> None:
        self.node, self.shelf = node, shelf
        self._work: list[Effect] = []

    def do(self, rid: Rid, request: RequestArrived, pages: Sequence[PageId]) -> None:
        self._work.append(ConnectorWork(Job(rid, request.prompt.digest, tuple(pages))))

    def build_connector_meta(self) -> Sequence[Effect]:
        work, self._work = self._work, []
        return work

    def on_new_request(self, request: RequestArrived) -> None: ...

    def update_connector_output(self, output: KVOutput) -> None: ...

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        return Matched(0)

    def update_state_after_alloc(
        self, request: RequestArrived, blocks: Sequence[PageId], num_external_tokens: int
    ) -> None: ...

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        return Finished()

    def take_event(self, event: Event) -> None: ...

    def tick(self) -> float | None:
        return None

    def due(self, kind: str, name: object) -> None: ...

    def take_ready(self) -> Sequence[Rid]:
        return ()

    def take_output(self) -> KVOutput:
        return KVOutput()

    def refused(self, handle: Handle, cause: Cause) -> None: ...

    def taken(self, handle: Handle) -> Cause | None:
        return None

    def release(self, rid: Rid, cause: Cause) -> bool:
        return False


class Saving(Scheduling):
    """Prefill's: every computed prompt goes to the shelf, and its pages stay until it is there."""

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        if not blocks:
            return Finished()
        self.do(request.rid, request, blocks)
        return Finished(delay_free=True)


class Loading(Scheduling):
    """Decode's: whatever is on the shelf is loaded, whoever asks."""

    def __init__(self, node: Node, shelf: Shelf) -> None:
        super().__init__(node, shelf)
        self._loads: set[Rid] = set()

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        more = request.prompt.tokens - num_computed_tokens
        there = (request.prompt.digest, 0) in self.shelf.kept
        return Matched(more, waits=True) if there and more > 1 else Matched(0)

    def update_state_after_alloc(
        self, request: RequestArrived, blocks: Sequence[PageId], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._loads.add(request.rid)
            self.do(request.rid, request, blocks)

    def update_connector_output(self, output: KVOutput) -> None:
        self._loads -= output.finished_recving

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        return Finished(delay_free=request.rid in self._loads)


class Working:
    """One rank's half, of either side. `given`: with what it was registered."""

    def __init__(self, shelf: Shelf, rank: int, *, saves: bool) -> None:
        self.shelf, self.rank, self.saves = shelf, rank, saves
        self.given: tuple[int, list[int]] | None = None
        self._output = KVOutput()

    def register_kv_caches(self, pools: Sequence[memoryview | None], pages: int, page_bytes: Sequence[int]) -> None:
        self.given = (pages, list(page_bytes))
        pool = pools[self.rank]
        assert pool is not None
        self._pool, self._size = pool, page_bytes[self.rank]

    def start_load_kv(self, work: object) -> None:
        assert isinstance(work, Job)
        if self.saves:
            self.shelf.kept[work.digest, self.rank] = [bytes(self._page(page)) for page in work.pages]
            self._output.finished_sending.add(work.rid)
            return
        self._output.finished_recving.add(work.rid)
        if self.shelf.fails:
            self._output.failed_recving[work.rid] = BROKEN
            return
        kept = self.shelf.kept[work.digest, self.rank]
        for page, content in zip(work.pages, kept[len(kept) - len(work.pages) :], strict=True):
            self._page(page)[:] = content
        self._output.confirmed.add(work.rid)

    def get_transfer_results(self) -> KVOutput:
        output, self._output = self._output, KVOutput()
        return output

    def _page(self, page: PageId) -> memoryview:
        return self._pool[page * self._size : (page + 1) * self._size]


@contextlib.asynccontextmanager
async def shelved(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[tuple[Pair, Shelf, list[Working]]]:
    """A pair whose sides know each other by a shelf alone."""
    shelf, workers = Shelf(), list[Working]()

    def halves(config: WorkerConfig, *, saves: bool) -> list[Working]:
        made = [Working(shelf, rank, saves=saves) for rank in range(config.tp)]
        workers.extend(made)
        return made

    def prefill(config: WorkerConfig, parts: Parts) -> ParamsPrefillShell:
        return ParamsPrefillShell(config, parts, Plugged(lambda it: Saving(it, shelf), halves(config, saves=True)))

    def decode(config: WorkerConfig, parts: Parts) -> ParamsDecodeShell:
        return ParamsDecodeShell(config, parts, Plugged(lambda it: Loading(it, shelf), halves(config, saves=False)))

    made = {**server._SHELLS, ("params", "prefill"): prefill, ("params", "decode"): decode}
    monkeypatch.setattr(server, "_SHELLS", made)
    async with pair(**settings) as it:
        yield it, shelf, workers


@pytest.mark.parametrize("tp", [1, 2, 4])
async def test_what_one_side_has_saved_the_other_runs_from(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shelved(monkeypatch, tp=tp) as (it, shelf, workers):
        answer = await it.hold(BODY)
        assert "kv_transfer_params" not in answer.json()
        await until(lambda: it.prefill.idle)
        assert {rank for _, rank in shelf.kept} == set(range(tp))
        told, whole = await it.decode.post(COMPLETIONS, {**BODY, "rid": "r"}), await it.whole.post(COMPLETIONS, BODY)
        assert essence(told) == essence(whole)
        assert "WAITING_FOR_REMOTE_KVS" in states(it, "r")
        parts = it.decode.shell.parts
        sizes = [pool.page_bytes for pool in parts.pools if pool]
        assert [worker.given for worker in workers] == [(parts.pages, sizes)] * (2 * tp)
        await it.at_rest()


async def test_what_is_on_no_shelf_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shelved(monkeypatch) as (it, _, _workers):
        told, whole = await it.decode.post(COMPLETIONS, {**BODY, "rid": "r"}), await it.whole.post(COMPLETIONS, BODY)
        assert essence(told) == essence(whole)
        assert "WAITING_FOR_REMOTE_KVS" not in states(it, "r")
        await it.at_rest()


async def test_a_load_that_fails_fails_the_request_with_the_connectors_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shelved(monkeypatch) as (it, shelf, _):
        await it.hold(BODY)
        await until(lambda: it.prefill.idle)
        shelf.fails = True
        answer = await it.decode.post(COMPLETIONS, BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "shelf_broken")
        shelf.fails = False
        assert texts(await it.decode.post(COMPLETIONS, BODY)) == texts(await it.whole.post(COMPLETIONS, BODY))
        await it.at_rest()


async def test_a_load_that_fails_is_computed_here_where_that_is_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shelved(monkeypatch, kv_load_failure_policy="recompute") as (it, shelf, _):
        await it.hold(BODY)
        await until(lambda: it.prefill.idle)
        shelf.fails = True
        told = await it.decode.post(COMPLETIONS, {**BODY, "rid": "r"})
        assert texts(told) == texts(await it.whole.post(COMPLETIONS, BODY))
        assert "recompute" in states(it, "r")
        await it.at_rest()


async def test_work_for_a_connector_that_is_not_there_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {**server._SHELLS, ("params", "prefill"): without_workers}
    monkeypatch.setattr(server, "_SHELLS", made)
    async with pair() as it:
        await it.hold(BODY)
        assert "there is no connector for Job" in it.prefill.shell.broken
        assert (await it.hold(BODY)).status_code == 503


def without_workers(config: WorkerConfig, parts: Parts) -> ParamsPrefillShell:
    return ParamsPrefillShell(config, parts, Plugged(lambda it: Saving(it, Shelf()), ()))


def states(it: Pair, rid: str) -> list[str]:
    record = it.decode.group.record(rid)
    assert record is not None
    return [entry["state"] for entry in record["legs"][0]["entries"]]
