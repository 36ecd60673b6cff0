"""Worker halves that do what none should, around one that does it right: for whoever wants to know what becomes of a
request then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdplane.core.connector import WorkerConnector
from pdplane.core.errors import Cause
from pdplane.core.events import KVOutput
from pdplane.core.ids import PageId, Rid

Bend = Callable[[KVOutput, dict[Rid, tuple[PageId, ...]]], KVOutput]
"""What is said in place of what was to be said; and the pages of every load so far."""

BROKEN = Cause("kv_load_failed", "as a test has it", 502, retryable=True, side="decode")


class Bent:
    """What `inner` reports, as `bend` has it."""

    def __init__(self, inner: WorkerConnector, bend: Bend) -> None:
        self._inner, self._bend = inner, bend
        self._pages: dict[Rid, tuple[PageId, ...]] = {}

    def register_kv_caches(self, pools: Sequence[memoryview | None], pages: int, page_bytes: Sequence[int]) -> None:
        self._inner.register_kv_caches(pools, pages, page_bytes)

    def start_load_kv(self, work: object) -> None:
        self._pages[work.rid] = work.pages  # type: ignore[attr-defined]
        self._inner.start_load_kv(work)

    def get_transfer_results(self) -> KVOutput:
        return self._bend(self._inner.get_transfer_results(), self._pages)


def fails_at(page: int) -> Bend:
    """Of every load the pages from this one on are bad."""

    def bend(output: KVOutput, pages: dict[Rid, tuple[PageId, ...]]) -> KVOutput:
        bad = {block for rid in output.finished_recving for block in pages[rid][page:]}
        return msgspec.structs.replace(output, invalid_block_ids=output.invalid_block_ids | bad)

    return bend


def fails(output: KVOutput, pages: dict[Rid, tuple[PageId, ...]]) -> KVOutput:
    """Nothing of any load is to be trusted."""
    failed = dict.fromkeys(output.finished_recving, BROKEN)
    return msgspec.structs.replace(output, failed_recving=failed, confirmed=set())


def fails_and_confirms(output: KVOutput, pages: dict[Rid, tuple[PageId, ...]]) -> KVOutput:
    """Contradicts itself."""
    return msgspec.structs.replace(output, failed_recving=dict.fromkeys(output.finished_recving, BROKEN))


def never_reports(output: KVOutput, pages: dict[Rid, tuple[PageId, ...]]) -> KVOutput:
    return KVOutput()


def never_confirms(output: KVOutput, pages: dict[Rid, tuple[PageId, ...]]) -> KVOutput:
    return msgspec.structs.replace(output, confirmed=set())


class Again:
    """Says everything a second time, with the next question; and of somebody whom nobody knows."""

    def __init__(self) -> None:
        self._said = KVOutput()

    def __call__(self, output: KVOutput, pages: dict[Rid, tuple[PageId, ...]]) -> KVOutput:
        said, self._said = self._said, output
        unknown = {Rid("nobody")} if output.finished_recving or output.finished_sending else set()
        return KVOutput(
            finished_sending=output.finished_sending | said.finished_sending | unknown,
            finished_recving=output.finished_recving | said.finished_recving | unknown,
            failed_recving=output.failed_recving | said.failed_recving,
            confirmed=output.confirmed | said.confirmed | unknown,
            invalid_block_ids=output.invalid_block_ids,
        )


class FailsLate:
    """Says that a load is over and, with the next question, that it was not right after all."""

    def __init__(self) -> None:
        self._over: set[Rid] = set()

    def __call__(self, output: KVOutput, pages: dict[Rid, tuple[PageId, ...]]) -> KVOutput:
        over, self._over = self._over, output.finished_recving
        return msgspec.structs.replace(output, failed_recving=dict.fromkeys(over, BROKEN), confirmed=set())
