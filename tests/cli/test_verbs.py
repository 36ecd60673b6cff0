"""drain and release: what they do to a worker, what they say, and what they refuse."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from pdplane.cli.main import main
from pdplane.worker.http import HttpSettings, build_app
from tests.worker.fleets import COMPLETIONS, HOST, Talk, fleet, until
from tests.worker.http_fakes import FakeService

from .test_looking import BODY, Terminal, terminal

__all__ = ["terminal"]

RELEASE = ("--instance", "d1", "--grant", "7")


@contextlib.asynccontextmanager
async def worker(service: FakeService, **settings: Any) -> AsyncIterator[str]:
    """A fake worker's HTTP edge on a free port; its URL."""
    with contextlib.closing(socket.socket()) as sock:
        sock.bind((HOST, 0))
        config = uvicorn.Config(
            build_app(service, HttpSettings(**settings)), log_level="error", lifespan="off", loop="none"
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await until(lambda: server.started)
        yield f"http://{HOST}:{sock.getsockname()[1]}"
        server.should_exit = True
        await serving


# --- drain --------------------------------------------------------------------------------------------------------


async def test_drain_takes_a_worker_out_while_what_runs_on_it_finishes(terminal: Terminal) -> None:
    async with fleet(1, 2) as it:
        for one in it.decodes:
            one.engine.allow = 2
        talk = Talk(it.url, BODY)
        await until(lambda: any(one.engine.allow == 0 for one in it.decodes))
        left = next(one for one in it.decodes if one.engine.allow == 0)
        assert await terminal.run("drain", left.url, "--reason", "new kernel") == 0
        assert terminal.out == f"{left.url} drains: it takes nothing new, 1 request on it may finish\n"
        for one in it.decodes:
            one.let_go()
        assert (await talk.answer()).status_code == 200
        await until(lambda: any(worker.draining == "new kernel" for worker in it.router.pairing.decodes))
        for _ in range(4):
            assert (await it.post(COMPLETIONS, BODY)).status_code == 200
        assert await terminal.run("status", "--url", it.url) == 0
        assert "OUT: draining: new kernel" in terminal.out
        assert await terminal.run("drain", left.url) == 0
        assert "nothing runs on it" in terminal.out


# --- release ------------------------------------------------------------------------------------------------------


async def test_release_says_what_it_freed_and_that_nothing_proved_it(terminal: Terminal) -> None:
    service = FakeService("decode")
    async with worker(service) as url:
        assert await terminal.run("release", url, *RELEASE) == 0
        assert terminal.out == f"freed 3 pages of grant 7 of instance d1 at {url}\n"
        assert "UNPROVEN" in terminal.err
        assert service.quarantined == {}


async def test_a_release_of_nothing_is_seen_and_ends_with_1(terminal: Terminal) -> None:
    async with worker(FakeService("decode")) as url:
        assert await terminal.run("release", url, "--instance", "d2", "--grant", "7") == 1
        assert terminal.out.startswith("nothing was freed: grant 7 of instance d2")
        assert "UNPROVEN" not in terminal.err


async def test_a_release_before_a_real_worker_finds_nothing_in_quarantine(terminal: Terminal) -> None:
    async with fleet() as it:
        instance = it.decode.shells[0].instance
        assert await terminal.run("release", it.decode.url, "--instance", instance, "--grant", "1") == 1


@pytest.mark.parametrize("grant", ["0", "-3", "9223372036854775808"])
async def test_a_grant_that_is_none_is_named(grant: str, terminal: Terminal) -> None:
    service = FakeService("decode")
    async with worker(service) as url:
        assert await terminal.run("release", url, "--instance", "d1", f"--grant={grant}") == 2
        assert grant in terminal.err
        assert service.quarantined


@pytest.mark.parametrize("argv", [("release", "http://h:1"), ("release", "http://h:1", "--instance", "d"), ("drain",)])
def test_what_must_be_given_is_asked_for(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


# --- whom a verb is said to, and who may ------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [("drain",), ("release", *RELEASE)])
async def test_a_verb_said_to_the_router_says_to_name_a_worker(verb: tuple[str, ...], terminal: Terminal) -> None:
    async with fleet() as it:
        assert await terminal.run(verb[0], it.url, *verb[1:]) == 2
        assert "is a router" in terminal.err
        assert "pdplane status" in terminal.err


@pytest.mark.parametrize("verb", [("drain",), ("release", *RELEASE)])
async def test_where_no_worker_is_the_address_and_the_remedy_are_said(
    verb: tuple[str, ...], terminal: Terminal
) -> None:
    with contextlib.closing(socket.socket()) as nobody:
        nobody.bind((HOST, 0))
        url = f"http://{HOST}:{nobody.getsockname()[1]}"
        assert await terminal.run(verb[0], url, *verb[1:]) == 2
    assert url in terminal.err
    assert "pdplane status" in terminal.err


async def test_from_elsewhere_the_key_decides(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdplane.worker.http.operator.is_loopback", lambda host: False)
    service = FakeService("decode")
    async with worker(service) as url:
        assert await terminal.run("drain", url, "--admin-key", "sesame") == 2
        assert "(403)" in terminal.err
        assert "--admin-key" in terminal.err
    async with worker(service, admin_key="sesame") as url:
        assert await terminal.run("drain", url) == 2
        assert "(401)" in terminal.err
        assert not service.drained
        assert await terminal.run("drain", url, "--admin-key", "sesame") == 0
        assert service.drained


async def test_the_key_may_come_from_the_environment(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdplane.worker.http.operator.is_loopback", lambda host: False)
    monkeypatch.setenv("PDPLANE_WORKER_ADMIN_KEY", "sesame")
    async with worker(FakeService("decode"), admin_key="sesame") as url:
        assert await terminal.run("drain", url) == 0
