"""`pdplane up` as a user runs it: real processes, a real (tiny) model, a stop with Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from pdplane.cli.main import main
from tests.engine.tiny import write_checkpoint

LIMIT_S = 60.0


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(contextlib.closing(socket.socket())) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [str(sock.getsockname()[1]) for sock in socks]


@contextlib.asynccontextmanager
async def up(home: Path, *more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A fleet of one pair, and where its router is."""
    port, *others = free_ports(4)
    flags = ("--prefill-port", "--decode-port", "--bootstrap-port")
    named = [part for pair in zip(flags, others, strict=True) for part in pair]
    model = write_checkpoint(home / "tiny")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdplane", "up", "--port", port, *named, *more),
        *("--model", str(model), "--pool-mb", "16", "--batch-invariant"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PDPLANE_HOME": str(home)},
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def lines_until(process: asyncio.subprocess.Process, wanted: str) -> str:
    """What the fleet prints, up to the line that has `wanted`."""
    assert process.stdout is not None
    seen = ""
    async with asyncio.timeout(LIMIT_S):
        while wanted not in seen:
            line = await process.stdout.readline()
            assert line, f"it ended before it said {wanted!r}:\n{seen}"
            seen += line.decode()
    return seen


async def test_a_fleet_comes_up_answers_explains_itself_and_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with up(tmp_path) as (process, url):
        welcome = await lines_until(process, "Ctrl-C")
        assert f"ready: {url}" in welcome
        assert f"curl {url}/v1/chat/completions" in welcome
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as http:
            body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] <= 8
        assert await asyncio.to_thread(main, ["status", "--url", url, "--json"]) == 0
        workers = json.loads(capsys.readouterr().out)["workers"]
        assert [worker["role"] for worker in workers] == ["prefill", "decode"]
        assert await asyncio.to_thread(main, ["explain", answer.json()["id"], "--url", url]) == 0
        assert " decode     Success (" in capsys.readouterr().out
        process.send_signal(signal.SIGINT)
        await lines_until(process, "stopping")
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
        for worker in workers:
            assert await asyncio.to_thread(main, ["status", "--url", worker["url"]]) == 2
        assert "nobody answers" in capsys.readouterr().err


async def texts_of(url: str, count: int) -> list[str]:
    """Greedy answers to so many prompts at once."""
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as http:

        async def ask(number: int) -> str:
            body = {"prompt": f"number {number} " * (1 + number % 4), "temperature": 0, "max_tokens": 12}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        return await asyncio.gather(*(ask(number) for number in range(count)))


SIZES = {
    "equal": (),
    "unequal, over shm_push": (
        *("--prefill-dp", "2", "--prefill-tp", "2", "--decode-tp", "4", "--transport", "shm_push"),
        *("--decode-allocation-policy", "prefill_complete"),
    ),
    "unequal, over tcp": (
        *("--prefill-tp", "4", "--decode-dp", "2", "--transport", "tcp", "--load-balance-method", "total_requests"),
    ),
}


async def test_fleets_of_every_size_give_the_same_text_and_outlive_the_drain_of_their_decode(tmp_path: Path) -> None:
    told = {}
    for name, flags in SIZES.items():
        async with up(tmp_path, *flags) as (process, url):
            shown = await lines_until(process, "Ctrl-C")
            assert all(flag in shown for flag in flags if flag.startswith("--transport"))
            told[name] = await texts_of(url, 12)
            async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as http:
                [decode] = (await http.get(f"{url}/server_info")).json()["decode"]
                assert (await http.post(f"{decode}/drain")).json()["draining"]
                seen = await lines_until(process, "drained: no decode is left")
                assert "decode: nothing is left" in seen
                assert "ended: exit code 0" in seen
                answer = await http.post(f"{url}/v1/completions", json={"prompt": "hello"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_ready_pair")
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
    assert told["equal"] == told["unequal, over shm_push"] == told["unequal, over tcp"]
