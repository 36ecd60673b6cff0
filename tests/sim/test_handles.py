"""A handle in a router's hands: as prefill answered it, tampered with, and what decode's word on it means."""

from __future__ import annotations

import pytest

from pdplane.core.attempts import HANDOFF
from pdplane.core.effects import AnswerHeld
from pdplane.core.errors import Cause
from pdplane.core.events import ControlEndpoint, Handle
from pdplane.core.frames import PromptId, Row
from pdplane.core.ids import HoldNo, Instance, Rank, Rid, Shape
from pdplane.core.layout import PARAMS
from pdplane.sim.handles import answered, lost_hold, tampered
from pdplane.sim.params_plan import TAMPERS
from pdplane.sim.plan import plan

from .watched import pages

ROW = Row(first_token=1, prompt_tokens=9, prompt_digest=b"digest")
PROMPT, OTHER = PromptId(b"digest", 9), PromptId(b"another", 9)


class Prefill:
    name, instance, dp, first_port = "p1", Instance("p1#2"), 0, 17


def _answered() -> Handle:
    drawn = plan(0, pattern="calm", dialect=PARAMS)
    answer = AnswerHeld(Rid("r"), ROW, HoldNo(3), pages(4, 5, 6), 2.0)
    return answered(Prefill(), answer, PROMPT, drawn)


def test_a_handle_says_where_its_prefill_is_and_what_it_holds() -> None:
    handle = _answered()
    assert (handle.instance, handle.hold, handle.pages, handle.lease_s) == ("p1#2", 3, (4, 5, 6), 2.0)
    assert handle.prompt == PROMPT
    assert handle.endpoints[0] == (Rank(), ControlEndpoint("p1", 17))
    assert isinstance(handle.shape, Shape)


@pytest.mark.parametrize("how", TAMPERS)
def test_tampering_changes_one_thing(how: str) -> None:
    handle = _answered()
    other = tampered(handle, how, OTHER)
    fields = {name for name in handle.__struct_fields__ if getattr(handle, name) != getattr(other, name)}
    assert fields == {{"blocks": "pages", "digest": "prompt"}.get(how, how)}


def test_an_honest_router_changes_nothing() -> None:
    assert tampered(_answered(), "", OTHER) == _answered()


@pytest.mark.parametrize("code", ["spent", "expired", "unknown_hold", "wrong_instance"])
def test_a_hold_that_is_lost_may_be_asked_for_anew_and_blames_no_worker(code: str) -> None:
    failure = lost_hold(Cause(code, "gone", 409))
    assert failure is not None
    assert failure.cause.retryable
    assert failure.blames == HANDOFF


def test_any_other_word_is_taken_as_it_is() -> None:
    assert lost_hold(Cause("prompt_mismatch", "no", 400)) is None
