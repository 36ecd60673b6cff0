"""A connector whose prefill and decode know each other by a folder alone: pages as files, by prompt.

No handle, no session, no lease: prefill's half saves every prompt that was computed, decode's half loads what is there.
A file is named by the prompt's digest and the rank whose part of the pages it has; it comes into being at once, whole,
and carries a digest of each page, so that whoever has read it knows what is right: a load confirms itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from pdplane.core.connector import Finished, KVConnectorBase, Matched
from pdplane.core.errors import Cause
from pdplane.core.events import KVOutput, RequestArrived
from pdplane.core.frames import PromptId
from pdplane.core.ids import PageId, Rid
from pdplane.core.layout import pages_for
from pdplane.core.node import Node

LOOK_AGAIN_S = 0.05


class Work(msgspec.Struct, frozen=True):
    """What each rank is to save or to load: `pages` are those of the prompt from number `first` on."""

    rid: Rid
    prompt: PromptId
    pages: tuple[PageId, ...]
    first: int = 0


class Executor(Protocol):
    """Where the reading and writing is done, beside the caller: as concurrent.futures has it."""

    def submit(self, job: Callable[[], None]) -> object: ...


class Store:
    """The folder. Its names can be asked for by anybody, on any thread."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks

    def file(self, prompt: PromptId, rank: int) -> Path:
        return self.folder / f"{prompt.digest.hex()}.{prompt.tokens}.{rank}of{self.ranks}"

    def saving(self, prompt: PromptId) -> Path:
        """There while somebody computes or saves this prompt."""
        return self.folder / f"{prompt.digest.hex()}.{prompt.tokens}.saving"

    def has(self, prompt: PromptId) -> bool:
        return all(self.file(prompt, rank).exists() for rank in range(self.ranks))


# --- the scheduler's halves -----------------------------------------------------------------------------------------


class FileSaver(KVConnectorBase):
    """Prefill: keeps a prompt's pages until all of its ranks have written their files."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._saves: dict[Rid, PromptId] = {}

    def on_new_request(self, request: RequestArrived) -> None:
        self._store.saving(request.prompt).touch()

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        if not blocks:
            self._store.saving(request.prompt).unlink(missing_ok=True)
            return Finished()
        self.begin(Work(request.rid, request.prompt, tuple(blocks)))
        self._saves[request.rid] = request.prompt
        return Finished(delay_free=True)

    def update_connector_output(self, output: KVOutput) -> None:
        for rid in output.finished_sending & self._saves.keys():
            self._store.saving(self._saves.pop(rid)).unlink(missing_ok=True)


class FileLoader(KVConnectorBase):
    """Decode: what is there is loaded, what is on its way is waited for, and all else is computed here."""

    def __init__(self, node: Node, store: Store) -> None:
        super().__init__()
        self._node, self._store = node, store
        self._waiting: dict[Rid, PromptId] = {}
        self._loading: set[Rid] = set()
        self._ready: list[Rid] = []

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        prompt = request.prompt
        if self._store.has(prompt):
            more = prompt.tokens - num_computed_tokens
            return Matched(more, waits=True) if more > 1 else Matched(0)
        return Matched(None) if self._store.saving(prompt).exists() else Matched(0)

    def on_new_request(self, request: RequestArrived) -> None:
        self._waiting[request.rid] = request.prompt

    def update_state_after_alloc(
        self, request: RequestArrived, blocks: Sequence[PageId], num_external_tokens: int
    ) -> None:
        self._waiting.pop(request.rid, None)
        if num_external_tokens:
            self._loading.add(request.rid)
            first = pages_for(request.prompt.tokens, self._node.limits.page_size) - len(blocks)
            self.begin(Work(request.rid, request.prompt, tuple(blocks), first))

    def update_connector_output(self, output: KVOutput) -> None:
        self._loading -= output.finished_recving

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        """A load cannot be taken back: its pages are free when it is over."""
        self._waiting.pop(request.rid, None)
        return Finished(delay_free=request.rid in self._loading)

    def tick(self) -> float | None:
        """A folder tells nobody that it has changed."""
        ready = [rid for rid, prompt in self._waiting.items() if not self._store.saving(prompt).exists()]
        self._ready += ready
        return self._node.now + LOOK_AGAIN_S if len(ready) < len(self._waiting) else None

    def take_ready(self) -> Sequence[Rid]:
        ready, self._ready = self._ready, []
        return ready


# --- the worker's halves --------------------------------------------------------------------------------------------


class FileWorker:
    """One rank's half. `_do` runs on the executor, everything else on the caller's thread."""

    def __init__(self, store: Store, rank: int, executor: Executor) -> None:
        self.store, self.rank = store, rank
        self._executor = executor
        self._done: list[KVOutput] = []

    def register_kv_caches(self, pools: Sequence[memoryview | None], pages: int, page_bytes: Sequence[int]) -> None:
        pool = pools[self.rank]
        assert pool is not None
        self._pool, self._size = pool, page_bytes[self.rank]

    def start_load_kv(self, work: object) -> None:
        assert isinstance(work, Work)
        self._executor.submit(lambda: self._done.append(self._do(work)))

    def get_transfer_results(self) -> KVOutput:
        whole = KVOutput()
        while self._done:
            merge(whole, self._done.pop(0))
        return whole

    def _do(self, work: Work) -> KVOutput:
        raise NotImplementedError

    def _page(self, page: PageId) -> memoryview:
        return self._pool[page * self._size : (page + 1) * self._size]


class SavingWorker(FileWorker):
    def _do(self, work: Work) -> KVOutput:
        """Over, well or not: who finds no file computes the prompt itself."""
        at = self.store.file(work.prompt, self.rank)
        new = at.with_name(f"{at.name}.new")
        try:
            new.write_bytes(b"".join(_digest(self._page(page)) + self._page(page) for page in work.pages))
            new.replace(at)
        except OSError:
            new.unlink(missing_ok=True)
        return KVOutput(finished_sending={work.rid})


class LoadingWorker(FileWorker):
    def _do(self, work: Work) -> KVOutput:
        """Pages from the first bad one on are not there; those before it are."""
        try:
            kept = self.store.file(work.prompt, self.rank).read_bytes()
        except OSError as error:
            text = f"the KV of prompt {work.prompt.digest.hex()} cannot be loaded: {error}"
            cause = Cause("kv_load_failed", text, 502, retryable=True, side="decode")
            return KVOutput(finished_recving={work.rid}, failed_recving={work.rid: cause})
        bad = set(work.pages[self._load(work, kept) :])
        return KVOutput(finished_recving={work.rid}, confirmed={work.rid}, invalid_block_ids=bad)

    def _load(self, work: Work, kept: bytes) -> int:
        """How many of its pages are good, from the first one on."""
        each = DIGEST + self._size
        for at, page in enumerate(work.pages):
            start = (work.first + at) * each
            digest, content = kept[start : start + DIGEST], kept[start + DIGEST : start + each]
            if len(content) < self._size or _digest(content) != digest:
                return at
            self._page(page)[:] = content
        return len(work.pages)


DIGEST = 16


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def merge(whole: KVOutput, more: KVOutput) -> None:
    """Into `whole`, what was said later."""
    whole.finished_sending |= more.finished_sending
    whole.finished_recving |= more.finished_recving
    whole.failed_recving = more.failed_recving | whole.failed_recving
    whole.invalid_block_ids |= more.invalid_block_ids
    whole.confirmed |= more.confirmed
