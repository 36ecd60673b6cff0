"""A second connector at work: pages come by files, and the nodes do not know the difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdplane.core.effects import AnswerRow, Dial, RunWhole, Ungate
from pdplane.core.events import HandleRefused, Released, ReleaseHold
from pdplane.core.frames import PromptId
from pdplane.core.ids import Rid
from pdplane.core.pages import Page
from pdplane.core.params.table import RequestStatus

from ..core.facing import limits, only
from ..core.facing_params import FacingParams, answers, cause
from .facing_store import FacingStore


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 40, 48])
def test_what_prefill_has_saved_decode_loads(tmp_path: Path, ranks: int, tokens: int) -> None:
    world = FacingStore(tmp_path, ranks=ranks)
    world.saved(1, tokens)
    world.wants(1, tokens)
    world.work()
    assert world.run_of(1).computed == (tokens if tokens > 1 else 0)
    assert world.wrong_pages(1) == []
    assert world.may_leave(1)
    world.let_go(1)
    assert world.over()


def test_prefill_keeps_its_pages_until_every_rank_has_written_its_file(tmp_path: Path) -> None:
    world = FacingStore(tmp_path, ranks=2)
    world.computes(1)
    assert isinstance(only(answers(world.p, "p1")), AnswerRow)
    world.executor.run()
    world.reports(world.p, 0)
    assert world.prefill.ledger.counts[Page.HELD] == 3
    world.reports(world.p, 1)
    assert world.p.free == 16
    assert world.over()


def test_the_hooks_are_called_in_their_order(tmp_path: Path) -> None:
    world = FacingStore(tmp_path)
    world.saved(1)
    world.wants(1)
    assert world.status(1) is RequestStatus.WAITING_FOR_REMOTE_KVS
    world.work()
    world.let_go(1)
    assert world.saver.calls("p1") == ["on_new_request", "request_finished"]
    assert world.loader.calls("d1") == [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "request_finished",
    ]


def test_a_prompt_that_nobody_has_saved_is_computed_here(tmp_path: Path) -> None:
    world = FacingStore(tmp_path)
    world.wants(1)
    assert (world.run_of(1).computed, world.run_of(1).gated) == (0, False)
    assert world.wrong_pages(1) == []
    world.let_go(1)
    assert world.over()


def test_one_that_is_being_saved_is_waited_for_without_a_page(tmp_path: Path) -> None:
    world = FacingStore(tmp_path)
    world.computes(1)
    world.wants(1)
    world.wait(1.0)
    assert world.status(1) is RequestStatus.WAITING
    assert world.d.free == 16
    world.work()
    world.wait(0.1)
    assert world.status(1) is RequestStatus.WAITING_FOR_REMOTE_KVS
    world.work()
    assert world.run_of(1).computed == 40
    world.let_go(1)
    assert world.over()


def test_one_that_prefill_gave_up_is_computed_here(tmp_path: Path) -> None:
    world = FacingStore(tmp_path)
    world.ask(1)
    world.wants(1)
    world.leave(world.p, "p1")
    world.p.take(Released(rid=Rid("p1")))
    world.wait(0.1)
    assert world.run_of(1).computed == 0
    world.let_go(1)
    assert world.over()


def test_what_decode_has_of_it_is_not_loaded_again(tmp_path: Path) -> None:
    world = FacingStore(tmp_path)
    world.wants(1, 32, keys="ab")
    world.decoded(1, 33)
    world.let_go(1)
    world.saved(2, 40, keys="ab")
    world.wants(2, 40, keys="ab")
    assert len(world.scheduled(2).own) == 1
    world.work()
    assert (world.run_of(2).computed, world.run_of(2).shared) == (40, 2)
    assert world.wrong_pages(2) == []
    world.let_go(2)
    assert world.over()


def test_who_leaves_while_it_loads_gives_its_pages_back_when_the_load_is_over(tmp_path: Path) -> None:
    world = FacingStore(tmp_path, ranks=2)
    world.saved(1)
    world.wants(1)
    world.leave(world.d, "d1")
    assert world.d.failed("d1").code == "client_left"
    world.executor.run()
    world.reports(world.d, 0)
    assert world.decode.ledger.counts[Page.DRAINING] == 3
    world.reports(world.d, 1)
    assert world.d.all(RunWhole) == []
    assert world.over()


def test_a_damaged_file_is_good_up_to_the_damage(tmp_path: Path) -> None:
    world = FacingStore(tmp_path, recompute=True)
    world.saved(1, 64)
    file = world.store.file(PromptId(b"prompt", 64), 0)
    kept = bytearray(file.read_bytes())
    kept[len(kept) // 2 + 20] ^= 1  # in the third page of four
    file.write_bytes(kept)
    world.wants(1, 64)
    world.work()
    assert (world.run_of(1).computed, world.run_of(1).gated) == (32, False)
    assert world.wrong_pages(1) == []
    world.let_go(1)
    assert world.over()


@pytest.mark.parametrize("recompute", [True, False])
def test_a_file_that_is_gone_when_it_is_wanted(tmp_path: Path, recompute: bool) -> None:
    world = FacingStore(tmp_path, recompute=recompute)
    world.saved(1)
    world.wants(1)
    for file in tmp_path.iterdir():
        file.unlink()
    world.work()
    if recompute:
        assert (world.run_of(1).computed, world.wrong_pages(1)) == (0, [])
        world.let_go(1)
    else:
        assert (world.d.failed("d1").code, world.d.failed("d1").retryable) == ("kv_load_failed", True)
    assert world.over()


def test_a_folder_that_takes_nothing_costs_prefill_nothing_but_the_file(tmp_path: Path) -> None:
    world = FacingStore(tmp_path)
    world.computes(1)
    world.store.folder = tmp_path / "gone"
    world.work()
    assert world.p.free == 16
    world.wants(1)
    assert world.run_of(1).computed == 0
    world.let_go(1)
    assert world.over()


def test_pages_for_all_or_for_nobody(tmp_path: Path) -> None:
    world = FacingStore(tmp_path, d_limits=limits(pages=4))
    world.saved(1)
    world.saved(2, name=b"another")
    world.wants(1)
    world.wants(2, name=b"another")
    assert (world.status(1), world.status(2)) == (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING)
    world.work()
    world.let_go(1)
    world.work()
    assert [effect.rid for effect in world.d.all(Ungate) + world.d.all(RunWhole) if effect.rid == "d2"]
    assert world.wrong_pages(2) == []
    world.let_go(2)
    assert world.over()


def test_a_handle_is_nothing_to_it_and_nobody_is_held_for_a_reader(tmp_path: Path) -> None:
    """Whatever is said of holds meets a connector that has none."""
    world = FacingStore(tmp_path)
    world.saved(1)
    handle = FacingParams().hold(1)
    world.wants(1, handle=handle)
    world.d.take(HandleRefused(handle, cause()))
    world.p.take(ReleaseHold(Rid("p1"), cause()))
    assert world.p.counted("late") == ["release"]
    world.work()
    assert world.run_of(1).computed == 40
    assert world.d.all(Dial) == []
    world.let_go(1)
    assert world.over()
