"""The contract checker, around ours in whatever order things happen; and that it finds every breach that it is for.
Around the file store it stands in all of its tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from pdplane.core.connector import Finished, KVConnector, KVConnectorBase, Matched
from pdplane.core.effects import AnswerRow, ConnectorWork, Count
from pdplane.core.events import ConnectorOutput, KVOutput, Released, ReleaseHold, RequestArrived, Sampled
from pdplane.core.ids import PageId, Rank, Rid
from pdplane.core.node import Node
from pdplane.core.pages import Page
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.core.params.prefill import ParamsPrefillNode

from ..core.chaos_params import ChaosParams
from ..core.facing import limits
from ..core.facing_params import FacingParams, answers, cause, request
from .checker import Checked
from .facing_store import FacingStore


class Watched:
    """Makes checked connectors for the nodes of a world, ours unless `make` makes others."""

    def __init__(self) -> None:
        self.all: list[Checked] = []

    def decode(self, node: ParamsDecodeNode) -> KVConnector:
        self.all.append(Checked(node, node.pull))
        return self.all[-1]

    def prefill(self, node: ParamsPrefillNode) -> KVConnector:
        self.all.append(Checked(node, node.held))
        return self.all[-1]


def ours(**more: object) -> tuple[FacingParams, Watched]:
    watched = Watched()
    return FacingParams(d_connector=watched.decode, p_connector=watched.prefill, **more), watched  # type: ignore[arg-type]


def test_the_hooks_of_a_request_that_is_read() -> None:
    world, watched = ours()
    world.whole(1)
    world.let_go(1)
    decode, prefill = watched.all
    assert decode.calls("d1") == [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "request_finished",
    ]
    assert prefill.calls("p1") == ["on_new_request", "request_finished"]
    assert decode.settled() + prefill.settled() == []


@pytest.mark.parametrize("at", ["dialling", "waiting", "reading", "confirming", "running"])
def test_the_end_is_told_once_wherever_it_comes(at: str) -> None:
    world, watched = ours(d_limits=limits(pages=4))
    if at == "waiting":
        world.whole(2, 64)
    world.hold(1)
    world.second(1)
    if at != "dialling":
        world.pump()
    if at in ("confirming", "running"):
        world.land_all()
    if at == "running":
        world.pump()
    world.leave(world.d, "d1")
    for number in (1, 2):
        if Rid(f"d{number}") in world.decode.batch.running:
            world.let_go(number)
    world.pump()
    assert [checked.settled() for checked in watched.all] == [[], []]
    assert world.idle()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_load_that_is_refused_when_it_is_over(recompute: bool) -> None:
    world, watched = ours(recompute=recompute)
    world.hold(1)
    world.read(1)
    world.land_all()
    world.p.take(ReleaseHold(Rid("p1"), cause()))
    world.pump()
    world.let_go(1)
    if recompute:
        world.let_go(1)
    assert [checked.settled() for checked in watched.all] == [[], []]
    assert world.idle()


@pytest.mark.parametrize("base", range(0, 20, 10))
def test_ours_keeps_the_contract_whatever_happens(base: int) -> None:
    for seed in range(base, base + 10):
        watched = Watched()
        chaos = ChaosParams(Random(seed), d_connector=watched.decode, p_connector=watched.prefill)
        chaos.run(80)
        alive = [checked for checked in watched.all if any(box.node is checked.node for box in chaos.world.boxes)]
        left = [fault for checked in alive for fault in checked.settled()]
        assert left == [], seed
        assert chaos.world.idle()


def test_a_connector_that_says_nothing_more_keeps_nothing_and_loads_nothing() -> None:
    """What each connector starts from."""
    watched: list[Checked] = []

    def plain(node: Node) -> KVConnector:
        watched.append(Checked(node, KVConnectorBase()))
        return watched[-1]

    world = FacingParams(d_connector=plain, p_connector=plain)
    world.ask(1, 40, keys="ab")
    world.p.take(Sampled(rid=Rid("p1"), token=7))
    world.p.take(Released(rid=Rid("p1")))
    assert [type(answer) for answer in answers(world.p, "p1")] == [AnswerRow]
    assert world.prefill.ledger.counts[Page.CACHED] == 2
    world.d.take(request("d1", 40, b"prompt", 0.0))
    assert (world.run_of(1).computed, world.run_of(1).gated) == (0, False)
    world.let_go(1)
    assert [checked.settled() for checked in watched] == [[], []]
    assert world.idle()


# --- breaches -------------------------------------------------------------------------------------------------------


class Forgetful(KVConnectorBase):
    """Does a question's work when it is asked."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        self.node.out.append(Count("asked"))
        return Matched(0)


class Fickle(KVConnectorBase):
    """Says one thing and then another."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        self.asked += 1
        return Matched(self.asked, waits=True)


class Boasting(KVConnectorBase):
    """Has more than there is."""

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        return Matched(request.prompt.tokens + 1, waits=True)


class Waiting(KVConnectorBase):
    """Lets somebody wait for nothing."""

    def get_num_new_matched_tokens(self, request: RequestArrived, num_computed_tokens: int) -> Matched:
        return Matched(0, waits=True)


class Repeating(KVConnectorBase):
    """Says again what was taken out."""

    def build_connector_meta(self) -> Sequence[ConnectorWork]:
        return [ConnectorWork("again")]


class Keeping(KVConnectorBase):
    """Keeps what is nothing."""

    def request_finished(self, request: RequestArrived, blocks: Sequence[PageId]) -> Finished:
        return Finished(delay_free=True)


class Hasty(KVConnectorBase):
    """Wants a turn that is over."""

    def tick(self) -> float | None:
        return -1.0


@pytest.mark.parametrize(
    ("make", "breach"),
    [
        (Forgetful, "side effects"),
        (lambda node: Fickle(), "asked again it says"),
        (lambda node: Boasting(), "41 tokens can be had of 40"),
        (lambda node: Waiting(), "nobody waits"),
        (lambda node: Repeating(), "said again"),
        (lambda node: Hasty(), "a turn that is over"),
    ],
)
def test_a_breach_at_decode_is_found(make: object, breach: str) -> None:
    def connector(node: ParamsDecodeNode) -> KVConnector:
        return Checked(node, make(node))  # type: ignore[operator]

    world = FacingParams(d_connector=connector)
    with pytest.raises(AssertionError, match=breach):
        world.d.take(request("d1", 40, b"prompt", 0.0))


def test_nothing_that_is_kept_at_prefill_is_found() -> None:
    world = FacingParams(p_connector=lambda node: Checked(node, Keeping()))
    world.ask(1)
    with pytest.raises(AssertionError, match="nothing of p1 to keep"):
        world.leave(world.p, "p1")


@pytest.mark.parametrize(
    ("output", "breach"),
    [
        (KVOutput(failed_recving={Rid("d1"): cause()}), "its load is not over"),
        (KVOutput(confirmed={Rid("d1")}), "before its load is over"),
    ],
)
def test_a_report_that_none_should_make_is_found(tmp_path: Path, output: KVOutput, breach: str) -> None:
    world = FacingStore(tmp_path)
    world.saved(1)
    world.wants(1)
    with pytest.raises(AssertionError, match=breach):
        world.loader.update_connector_output(output)


@pytest.mark.parametrize("computed", [False, True])
def test_a_notice_of_what_is_not_finished_or_not_kept_is_found(tmp_path: Path, computed: bool) -> None:
    """I04: it would take pages from a prompt that is being computed."""
    world = FacingStore(tmp_path)
    world.ask(1)
    if computed:
        world.p.take(Sampled(rid=Rid("p1"), token=7))
        world.p.take(Released(rid=Rid("p1")))
        world.saver.seen[Rid("p1")].kept = False  # as if nothing had been
    with pytest.raises(AssertionError, match="nothing was kept" if computed else "has not ended"):
        world.p.take(ConnectorOutput(Rank(), KVOutput(finished_sending={Rid("p1")})))


def test_a_scheduler_that_calls_out_of_order_is_found(tmp_path: Path) -> None:
    world = FacingStore(tmp_path)
    world.saved(1)
    world.wants(1)
    asked, unknown = world.scheduled(1).arrived, request("d9", 40, b"prompt", 0.0)
    for call, breach in (
        (lambda: world.loader.on_new_request(asked), "came twice"),
        (lambda: world.loader.get_num_new_matched_tokens(asked, 0), "asked again"),
        (lambda: world.loader.update_state_after_alloc(asked, (), 0), "came twice"),
        (lambda: world.loader.request_finished(unknown, ()), "has not come"),
    ):
        with pytest.raises(AssertionError, match=breach):
            call()
    world.leave(world.d, "d1")
    with pytest.raises(AssertionError, match="has ended"):
        world.loader.request_finished(asked, ())


def test_pages_that_are_shared_before_they_are_there_are_found(tmp_path: Path) -> None:
    """Not there yet, they are no prefix."""
    world = FacingStore(tmp_path)
    world.saved(1, keys="ab")
    world.wants(1, keys="ab")
    scheduled = world.scheduled(1)
    world.decode.pages.keep(scheduled.prompt, scheduled.pages, 0, scheduled.owner, scheduled.page_state)
    with pytest.raises(AssertionError, match="while they are filled"):
        world.loader.update_connector_output(KVOutput())
