"""The command line before a fleet of the params dialect: what is held, who asked for it, and how it is let go."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import pytest

from pdplane.cli.main import parser
from pdplane.cli.up import UpConfig, plan
from pdplane.router.config import RouterConfig
from pdplane.settings import BadSetting, load
from pdplane.worker.config import WorkerConfig
from tests.worker.fleets import COMPLETIONS, QUICK, Fleet, Talk, fleet, until
from tests.worker.pairs import HOLD

from .test_looking import BODY, Terminal, terminal

__all__ = ["terminal"]


def params(**settings: Any) -> contextlib.AbstractAsyncContextManager[Fleet]:
    return fleet(both={"dialect": "params", **QUICK}, **settings)


async def held(it: Fleet) -> str:
    """The name of what prefill holds for a reader that has not come."""
    leg = {**BODY, "max_tokens": 1, "rid": "mine", "kv_transfer_params": HOLD}
    answer = await it.prefill.post(COMPLETIONS, leg)
    return str(answer.json()["kv_transfer_params"]["remote_request_id"])


# --- up -------------------------------------------------------------------------------------------------------------


def test_a_fleet_has_its_dialect_lease_and_policy_and_no_registry() -> None:
    config = UpConfig(dialect="params", lease_s=7.0, kv_load_failure_policy="recompute", prefill=2)
    parts = {part.name: parser().parse_args(part.arguments) for part in plan(config)}
    workers = [load(WorkerConfig, vars(parts[name]), {}) for name in ("prefill 0", "prefill 1", "decode 0")]
    assert [one.dialect for one in workers] == ["params"] * 3
    assert [one.lease_s for one in workers[:2]] == [7.0, 7.0]
    assert workers[2].kv_load_failure_policy == "recompute"
    assert load(RouterConfig, vars(parts["router"]), {}).prefill == ("http://127.0.0.1:8100", "http://127.0.0.1:8101")
    assert {name for part in plan(config) for name, _ in part.ports} == {"prefill_port", "decode_port", "port"}


@pytest.mark.parametrize(("lease_s", "margin_s"), [(30.0, 1.0), (4.0, 1.0), (1.0, 0.25)])
def test_a_short_lease_leaves_its_fleets_router_a_margin_that_fits(lease_s: float, margin_s: float) -> None:
    router = plan(UpConfig(dialect="params", lease_s=lease_s))[-1]
    assert load(RouterConfig, vars(parser().parse_args(router.arguments)), {}).lease_margin_s == margin_s


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (UpConfig(dialect="params", decode_allocation_policy="prefill_complete"), "prefill always computes first"),
        (UpConfig(dialect="params", transport=("shm_push",)), "params pulls"),
        (UpConfig(dialect="params", lease_s=0.0), "--lease-s 0"),
        (UpConfig(dialect="params", lease_s=math.inf), "held for ever"),
        (UpConfig(lease_s=7.0), "--lease-s 7 is of --dialect params"),
        (UpConfig(kv_load_failure_policy="recompute"), "recompute is of --dialect params"),
    ],
    ids=["policy", "transport", "lease", "endless lease", "lease in rooms", "recompute in rooms"],
)
def test_what_a_dialect_cannot_do_is_refused_before_anything_starts(config: UpConfig, named: str) -> None:
    with pytest.raises(BadSetting, match=named):
        plan(config)


# --- status ---------------------------------------------------------------------------------------------------------


async def test_status_shows_the_dialect_and_what_is_held_for_whom(terminal: Terminal) -> None:
    async with params() as it:
        rid = await held(it)
        assert await terminal.run("status", "--url", it.url) == 0
        assert "dialect params, transports shm, tcp, lease 30.0 s" in terminal.out
        assert "dialect params, policy fail, transports shm, tcp" in terminal.out
        assert re.search(rf"hold 1 of {rid}: 4 pages, \d+\.\d s left, nobody has asked for it", terminal.out)


# --- explain --------------------------------------------------------------------------------------------------------


async def test_explain_tells_both_legs_in_the_order_in_which_they_went(terminal: Terminal) -> None:
    async with params() as it:
        answer = (await it.post(COMPLETIONS, BODY)).json()
        await it.at_rest()
        assert await terminal.run("explain", answer["id"], "--url", it.url) == 0
        lines = terminal.out.splitlines()
        assert re.search(r"attempt 0: prefill .*, decode .*, hold 1 of ", lines[1])
        story = [" ".join(line.split()[1:]) for line in lines if re.match(r" +\d", line)]
        steps = iter(story)
        for step in (
            "router prefill's leg sent",
            "prefill WAITING",
            "prefill Held (computed; its pages wait for decode, for a limited time): hold 1, 4 pages",
            "router decode's leg sent",
            "decode WAITING_FOR_REMOTE_KVS (all its pages are reserved, and are being read): 4 pages, 16 tokens",
            "decode Reading",
            "decode Ready",
            "router verdict ok",
        ):
            assert any(line.startswith(step) for line in steps), (step, story)
        granted = [line for line in lines if line.startswith("  grant ")]
        assert len(granted) == 2
        assert all(f"of instance {it.decode.shell.instance}" in line for line in granted)
        assert sum("holds nothing" in line for line in lines) == 2


async def test_explain_tells_what_is_held_while_decode_waits_for_pages(terminal: Terminal) -> None:
    async with params(decode={"reserve_tokens": 0}) as it:
        it.decode.engine.allow = 0
        others = [Talk(it.decode.url, {**BODY, "prompt": letter * 400}) for letter in "ab"]
        await until(lambda: len(it.decode.group.jobs) == 2)
        talk = Talk(it.url, {**BODY, "prompt": "p" * 400, "rid": "mine"})
        await until(lambda: it.decode.group.figures()["waiting"] == 1)
        assert await terminal.run("explain", "mine", "--url", it.url) == 0
        assert re.search(r"  hold 1 of \S+: 100 pages, \d+\.\d s left, nobody has asked for it", terminal.out)
        assert re.search(r"prefill .* holds 100 pages held", terminal.out)
        for one in (talk, *others):
            await one.drop()
        it.decode.let_go()
        await it.at_rest()


# --- release --------------------------------------------------------------------------------------------------------


async def test_release_lets_go_of_what_is_held_by_its_name(terminal: Terminal) -> None:
    async with params() as it:
        rid = await held(it)
        assert await terminal.run("release", it.prefill.url, "--hold", rid, "--hold", "nobody") == 0
        assert terminal.out.splitlines() == [
            f"released: {rid} at {it.prefill.url}",
            f"nothing is held for nobody at {it.prefill.url}; `pdplane status` shows what is",
        ]
        assert terminal.err == ""
        assert it.prefill.idle
        assert await terminal.run("release", it.prefill.url, "--hold", rid) == 1


async def test_a_release_before_a_decode_says_whom_to_ask(terminal: Terminal) -> None:
    async with params() as it:
        assert await terminal.run("release", it.decode.url, "--hold", "x") == 2
        assert "ask a prefill worker of dialect params" in terminal.err


@pytest.mark.parametrize(
    "argv", [("--hold", "x", "--grant", "1"), ("--hold", "x", "--instance", "d", "--grant", "1"), ()], ids=str
)
async def test_one_kind_of_release_is_asked_for(argv: tuple[str, ...], terminal: Terminal) -> None:
    with pytest.raises(SystemExit) as ended:
        await terminal.run("release", "http://h:1", *argv)
    assert ended.value.code == 2
