"""A prefill and a decode that know each other by a folder alone: FacingParams with pools, engines that write into them,
and worker halves whose jobs a test has done when it likes (`work`).

A page of a prompt holds bytes of its own, so that what decode runs on can be looked at.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from pdplane.core.connector import KVConnector, WorkerConnector
from pdplane.core.effects import ConnectorWork, Effect, RunPrefill, RunWhole
from pdplane.core.events import ConnectorOutput, KVOutput, Released, Sampled
from pdplane.core.ids import Rank, Rid
from pdplane.core.node import Limits

from ..core.facing import PAGE, Box
from ..core.facing_params import FacingParams, request
from .checker import Checked
from .failing import Bend, Bent
from .file_store import FileLoader, FileSaver, LoadingWorker, SavingWorker, Store

PAGE_BYTES = 64


class Later:
    """An executor whose jobs wait until somebody has them done."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def run(self) -> None:
        while self.jobs:
            self.jobs.popleft()()


class FacingStore(FacingParams):
    """`bends`: by rank, what decode's worker halves say in place of what they should; `p_bends`: prefill's. `watched`:
    the contract is checked, and a breach is an error."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int = 1,
        bends: dict[int, Bend] | None = None,
        p_bends: dict[int, Bend] | None = None,
        d_limits: Limits | None = None,
        watched: bool = True,
        **more: object,
    ) -> None:
        self.watched = watched
        self.store = Store(folder, ranks)
        self.executor = Later()
        self.pools: dict[Box, list[bytearray]] = {}
        self.workers: dict[Box, list[WorkerConnector]] = {}
        self.texts: dict[Rid, tuple[bytes, int]] = {}
        self.checked: list[Checked] = []
        super().__init__(
            tp=(ranks, ranks),
            d_connector=lambda node: self._watched(node, FileLoader(node, self.store)),
            p_connector=lambda node: self._watched(node, FileSaver(self.store)),
            d_limits=d_limits,
            **more,
        )
        self._equip(self.d, LoadingWorker, bends or {})
        self._equip(self.p, SavingWorker, p_bends or {})

    def _watched(self, node: object, inner: KVConnector) -> KVConnector:
        if not self.watched:
            return inner
        self.checked.append(Checked(node, inner))  # type: ignore[arg-type]
        return self.checked[-1]

    def _equip(self, box: Box, kind: type[LoadingWorker] | type[SavingWorker], bends: dict[int, Bend]) -> None:
        pages, ranks = box.node.limits.pages, self.store.ranks
        self.pools[box] = [bytearray(pages * PAGE_BYTES) for _ in range(ranks)]
        self.workers[box] = []
        for rank in range(ranks):
            worker: WorkerConnector = kind(self.store, rank, self.executor)
            worker = Bent(worker, bends[rank]) if rank in bends else worker
            worker.register_kv_caches([memoryview(pool) for pool in self.pools[box]], pages, [PAGE_BYTES] * ranks)
            self.workers[box].append(worker)

    def carry_out(self, box: Box, effect: Effect) -> None:
        match effect:
            case ConnectorWork(work):
                for worker in self.workers[box]:
                    worker.start_load_kv(work)
            case RunPrefill(rid, pages, cached_tokens):
                self._write(box, rid, pages, cached_tokens)
            case RunWhole(rid, pages, _, computed):
                self._write(box, rid, pages, computed)
            case _:
                super().carry_out(box, effect)

    # --- legs -------------------------------------------------------------------------------------------------------

    def saved(self, number: int, tokens: int = 40, name: bytes = b"prompt", **more: object) -> None:
        """Prefill has computed this prompt, and its files are there."""
        self.computes(number, tokens, name, **more)
        self.work()

    def ask(self, number: int, tokens: int = 40, name: bytes = b"prompt", **more: object) -> Rid:
        self.texts[Rid(f"p{number}")] = (name, tokens)
        return super().ask(number, tokens, name, **more)

    def computes(self, number: int, tokens: int = 40, name: bytes = b"prompt", **more: object) -> Rid:
        rid = self.ask(number, tokens, name, **more)
        self.p.take(Sampled(rid=rid, token=7))
        self.p.take(Released(rid=rid))
        return rid

    def wants(self, number: int, tokens: int = 40, name: bytes = b"prompt", **more: object) -> Rid:
        """A request at decode, which brings nothing but its prompt."""
        rid = Rid(f"d{number}")
        self.texts[rid] = (name, tokens)
        self.d.take(request(rid, tokens, name, self.now, **more))
        return rid

    def work(self) -> None:
        """All jobs are done, and whatever there is to report is reported: twice, so that nothing is left."""
        self.executor.run()
        for box in (self.p, self.d):
            for rank in (*range(self.store.ranks), *range(self.store.ranks)):
                self.reports(box, rank)

    def reports(self, box: Box, rank: int) -> KVOutput:
        """What one rank's worker half says now."""
        output = self.workers[box][rank].get_transfer_results()
        if any(msgspec.structs.astuple(output)):
            box.take(ConnectorOutput(Rank(tp=rank), output))
        return output

    # --- what is looked at ------------------------------------------------------------------------------------------

    @property
    def loader(self) -> Checked:
        return self.checked[0]

    @property
    def saver(self) -> Checked:
        return self.checked[1]

    def wrong_pages(self, number: int) -> list[int]:
        """Which pages of its prompt are not as they should be where decode runs it."""
        rid, run = Rid(f"d{number}"), self.run_of(number)
        name, tokens = self.texts[rid]
        found = [
            [pool[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] for page in run.pages] for pool in self.pools[self.d]
        ]
        return [
            at
            for at in range(-(-tokens // PAGE))
            if any(part[at] != content(name, at, rank) for rank, part in enumerate(found))
        ]

    def over(self) -> bool:
        assert [fault for checked in self.checked for fault in checked.settled()] == []
        return self.idle()

    def _write(self, box: Box, rid: Rid, pages: tuple[int, ...], computed: int) -> None:
        """The engine computes the prompt's pages that are not there."""
        name, tokens = self.texts[rid]
        for at in range(computed // PAGE if computed < tokens else len(pages), -(-tokens // PAGE)):
            for rank, pool in enumerate(self.pools[box]):
                pool[pages[at] * PAGE_BYTES : (pages[at] + 1) * PAGE_BYTES] = content(name, at, rank)


def content(name: bytes, page: int, rank: int) -> bytes:
    """What one rank has of one page of a prompt."""
    return hashlib.blake2b(b"%s/%d/%d" % (name, page, rank), digest_size=PAGE_BYTES).digest()
