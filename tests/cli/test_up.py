"""`pdplane up`: what it would start, and how it tells of children that die."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from pathlib import Path

import pytest

from pdplane.cli import up
from pdplane.cli.child import Child
from pdplane.cli.main import main as cli
from pdplane.cli.main import parser
from pdplane.cli.up import Part, UpConfig, _until_ready, _watch, plan
from pdplane.settings import BadSetting, load
from pdplane.worker.config import WorkerConfig
from tests.worker.fleets import fleet, until


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


WAITS = "import time; print('here', flush=True); time.sleep(600)"


def test_ports_count_up_and_the_router_knows_every_worker() -> None:
    parts = plan(UpConfig(prefill=2, decode=2, aggregated=1, port=9000))
    assert [part.name for part in parts] == [
        "prefill 0",
        "prefill 1",
        "decode 0",
        "decode 1",
        "aggregated 0",
        "router",
    ]
    ports = [port for part in parts for port in part.ports]
    assert ports == [
        ("prefill_port", 8100),
        ("bootstrap_port", 8998),
        ("prefill_port", 8101),
        ("bootstrap_port", 8999),
        ("decode_port", 8200),
        ("decode_port", 8201),
        ("aggregated_port", 8300),
        ("port", 9000),
    ]
    router = parts[-1].arguments
    for address in ("http://127.0.0.1:8100@8998", "http://127.0.0.1:8101@8999", "http://127.0.0.1:8201"):
        assert address in router


def test_every_childs_arguments_are_a_command_that_parses_to_what_was_asked() -> None:
    config = UpConfig(
        model="/models/m", pool_mb=7, max_running=3, batch_invariant=True, request_timeout_s=9.0, shutdown_s=3.0
    )
    for part in plan(config):
        args = parser().parse_args(part.arguments)
        assert args.command == ("router" if part.name == "router" else "worker")
        if part.name != "router":
            worker = load(WorkerConfig, vars(args), {})
            assert (worker.model, worker.pool_mb, worker.max_running) == ("/models/m", 7, 3)
            assert (worker.batch_invariant, worker.request_timeout_s, worker.shutdown_s) == (True, 9.0, 3.0)


def test_sizes_policy_and_transports_reach_each_side() -> None:
    config = UpConfig(
        dp=2,
        prefill_tp=2,
        decode_dp=4,
        decode_tp=4,
        decode_allocation_policy="prefill_complete",
        load_balance_method="total_requests",
        transport=("shm_push", "tcp"),
        checksum=True,
        prefix_cache=False,
        reserve_tokens=7,
        page_size=8,
    )
    sides = {part.name: load(WorkerConfig, vars(parser().parse_args(part.arguments)), {}) for part in plan(config)[:2]}
    prefill, decode = sides["prefill 0"], sides["decode 0"]
    assert [(one.dp, one.tp) for one in (prefill, decode)] == [(2, 2), (4, 4)]
    assert prefill.load_balance_method == "total_requests"
    assert decode.reserve_tokens == 7
    for one in (prefill, decode):
        assert one.decode_allocation_policy == "prefill_complete"
        assert one.transports == ("shm_push", "tcp")
        assert (one.checksum, one.prefix_cache, one.page_size) == (True, False, 8)


def test_every_process_can_be_started_by_hand_as_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing(config: UpConfig, parts: list[Part]) -> int:
        return 0

    monkeypatch.setattr(up, "_supervise", nothing)
    monkeypatch.setattr(up, "_check_ports", lambda config, parts: None)
    assert cli(["up", "--model", str(tmp_path), "--decode-tp", "2"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "pdplane" in line]
    assert [line.split(":")[0] for line in shown] == ["prefill 0", "decode 0", "router"]
    for line in shown:
        parser().parse_args(shlex.split(line.split("pdplane ", 1)[1]))


def test_secrets_are_not_among_the_arguments_of_any_child() -> None:
    for part in plan(UpConfig(api_key="hush")):
        assert not any("hush" in argument for argument in part.arguments)


@pytest.mark.parametrize("config", [UpConfig(prefill=0), UpConfig(decode=0), UpConfig(prefill=-1)])
def test_a_fleet_without_a_pair_is_refused(config: UpConfig) -> None:
    with pytest.raises(BadSetting):
        plan(config)


def test_aggregated_workers_alone_are_a_fleet() -> None:
    parts = plan(UpConfig(prefill=0, decode=0, aggregated=1))
    assert [part.name for part in parts] == ["aggregated 0", "router"]


# --- children -----------------------------------------------------------------------------------------------------


async def test_a_childs_lines_are_shown_under_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    child = await Child.start("prefill 0", python("print('one'); print('two')"))
    assert await child.wait() == 0
    await child.end(5)
    assert capsys.readouterr().out == "[prefill 0] one\n[prefill 0] two\n"


async def test_a_dead_childs_obituary_has_its_last_lines_and_how_it_died() -> None:
    child = await Child.start("decode 0", python("for i in range(50): print('line', i)\nraise SystemExit(3)"))
    await child.wait()
    await child.end(5)
    told = child.obituary()
    assert "decode 0" in told
    assert "exit code 3" in told
    assert "line 49" in told
    assert "line 2\n" not in told


async def test_a_killed_childs_obituary_names_the_signal() -> None:
    child = await Child.start("decode 0", python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    await child.wait()
    await child.end(5)
    assert "SIGKILL" in child.obituary()


async def test_a_child_that_ignores_sigterm_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS
    child = await Child.start("router", python(stubborn))
    await until(lambda: "here" in capsys.readouterr().out)
    await child.end(0.05)
    assert "SIGKILL" in child.obituary()
    assert "killed" in capsys.readouterr().err


async def test_a_child_that_dies_while_the_fleet_starts_ends_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    well = await Child.start("prefill 0", python(WAITS))
    dead = await Child.start("decode 0", python("raise SystemExit('pdplane worker: --model: no such thing')"))
    await dead.wait()
    try:
        assert not await _until_ready(UpConfig(port=1), [well, dead], asyncio.Event())
    finally:
        await well.end(5)
        await dead.end(5)
    assert "decode 0" in capsys.readouterr().err


async def test_a_child_that_dies_later_is_told_and_the_rest_serves_on(capsys: pytest.CaptureFixture[str]) -> None:
    others = [await Child.start(name, python(WAITS)) for name in ("prefill 0", "decode 0", "router")]
    dying = await Child.start("decode 1", python("print('the last word'); raise SystemExit(7)"))
    stop = asyncio.Event()
    watching = asyncio.create_task(_watch([*others, dying], stop))
    told = ""
    async with asyncio.timeout(10):
        while "exit code 7" not in told:
            await asyncio.sleep(0.005)
            told += capsys.readouterr().err
    assert "the last word" in told
    assert not any(child.ended for child in others)
    assert not watching.done()
    stop.set()
    assert await watching == 1
    for child in others:
        await child.end(5)
    await dying.end(5)


async def test_a_child_that_was_drained_ends_well_and_the_rest_serves_on(capsys: pytest.CaptureFixture[str]) -> None:
    others = [await Child.start(name, python(WAITS)) for name in ("prefill 0", "decode 0", "router")]
    drained = await Child.start("decode 1", python("print('nothing is left')"))
    stop = asyncio.Event()
    watching = asyncio.create_task(_watch([*others, drained], stop))
    told = ""
    async with asyncio.timeout(10):
        while "ended: exit code 0" not in told:
            await asyncio.sleep(0.005)
            told += capsys.readouterr().err
    assert not watching.done()
    stop.set()
    assert await watching == 0
    for child in (*others, drained):
        await child.end(5)


async def test_a_stop_of_a_healthy_fleet_is_0() -> None:
    well = await Child.start("prefill 0", python(WAITS))
    stop = asyncio.Event()
    watching = asyncio.create_task(_watch([well], stop))
    await asyncio.sleep(0)
    stop.set()
    assert await watching == 0
    await well.end(5)
    assert well._process.returncode == -signal.SIGTERM


async def test_the_wait_for_a_pair_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    async with fleet() as it:
        it.decode.group.drain("it is stopping")
        await until(lambda: not it.router.pairing.ready)
        stop = asyncio.Event()
        waiting = asyncio.create_task(_until_ready(UpConfig(port=int(it.url.rsplit(":", 1)[1])), [], stop))
        await until(lambda: "waiting: no decode is ready" in capsys.readouterr().out)
        stop.set()
        assert not await waiting


async def test_the_last_decode_may_be_drained_and_the_router_stays(capsys: pytest.CaptureFixture[str]) -> None:
    others = [await Child.start(name, python(WAITS)) for name in ("prefill 0", "router")]
    drained = await Child.start("decode 0", python("print('nothing is left')"))
    stop = asyncio.Event()
    watching = asyncio.create_task(_watch([*others, drained], stop))
    told = ""

    def said() -> bool:
        nonlocal told
        told += capsys.readouterr().out
        return "drained: no decode is left, the router answers 503" in told

    await until(said)
    assert not watching.done()
    stop.set()
    assert await watching == 0
    for child in (*others, drained):
        await child.end(5)


async def test_a_second_ctrl_c_is_a_second_signal_to_a_child_that_had_none(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import signal, sys\n"
        "got = set()\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, lambda number, frame: got.add(number))\n"
        "print('here')\n"
        "while len(got) < 2: signal.sigtimedwait([], 0.01)\n"
        "print('cut')\n"
    )
    child = await Child.start("decode 0", python(code))
    await until(lambda: "here" in capsys.readouterr().out)
    child.cut()
    assert await child.wait() == 0
    await child.end(5)
    child.cut()


@pytest.mark.parametrize("dead", ["router", "prefill 0", "decode 0"])
async def test_a_fleet_that_cannot_serve_any_more_ends(dead: str, capsys: pytest.CaptureFixture[str]) -> None:
    children = [
        await Child.start(name, python("raise SystemExit(7)" if name == dead else WAITS))
        for name in ("prefill 0", "decode 0", "router")
    ]
    assert await asyncio.wait_for(_watch(children, asyncio.Event()), 10) == 1
    assert "what is left cannot serve" in capsys.readouterr().err
    for child in children:
        await child.end(5)
