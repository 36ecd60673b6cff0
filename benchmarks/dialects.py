"""`make bench-dialects`: rooms beside params, measured in one run.

    python benchmarks/dialects.py [--parts sizes leaving ...]

sizes: bytes of every control message. first-token: what a pair adds to the time to first token of one aggregated
worker, the same prompts to all three, turn by turn. leaving: a client leaves in each phase; when has each side every
page back? deaths: a worker is killed, or frozen, under a request; what is the client told, and when? Default settings
throughout. Exit status 1 where pages were not back within 2 s, an error had no code, or a fleet was not idle after.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
from asked import PATHS, told
from asking import Answer, ask, client
from client import Call
from fleet import Fleet, Process, fleet
from gated import by_ours
from idle import errors_logged, wait_idle
from leaving import Pair, leave_in_each
from message_sizes import messages
from prompts import Writer, tokenizer
from rows import Rows
from sides import MODEL, OurSide

DIALECTS = ("rooms", "params")
PARTS = ("sizes", "first-token", "leaving", "deaths")
SIZES = ((64, 16), (512, 16), (16_384, 16), (1 << 20, 64))
"""(prompt tokens, tokens of a page)."""

BACK_LIMIT_S = 2.0
KNOWN_LIMIT_S = 40.0
WARM_UPS = 3


def main() -> int:
    options = _parser().parse_args()
    started = time.monotonic()
    faults: list[str] = []
    if "sizes" in options.parts:
        _print_sizes()
    if "first-token" in options.parts:
        faults += _first_token(options)
    for dialect in DIALECTS:
        if {"leaving", "deaths"} & set(options.parts):
            with fleet(1, 1, worker_args=("--dialect", dialect, "--pool-mb", "384")) as made:
                faults += asyncio.run(_one_dialect(dialect, made, options))
    for fault in faults:
        print(f"FAULT: {fault}")
    print(f"faults: {len(faults) or 'none'}; {time.monotonic() - started:.0f} s")
    return 1 if faults else 0


# --- message sizes ----------------------------------------------------------------------------------------------------


def _print_sizes() -> None:
    print("bytes of each message of a request, by tokens of its prompt (and of a page)")
    heads = "".join(f"{f'{tokens} ({page})':>16}" for tokens, page in SIZES)
    print(f"  {'dialect':9}{'message':30}{'way':18}{heads}")
    for row in zip(*(messages(*size) for size in SIZES), strict=True):
        print(f"  {row[0].dialect:9}{row[0].name:30}{row[0].way:18}" + "".join(f"{one.size:>16}" for one in row))
    print(flush=True)


# --- time to first token ----------------------------------------------------------------------------------------------


def _first_token(options: argparse.Namespace) -> list[str]:
    with _three() as (whole, pairs):
        urls = {"aggregated": whole.aggregated[0].url}
        urls |= {name: made.router.url for name, made in pairs.items() if made.router}
        asyncio.run(_compare(urls, options))
        left = [what for made in (whole, *pairs.values()) for what in wait_idle(made, BACK_LIMIT_S)[1]]
    return [f"first-token: {what}" for what in left]


@contextlib.contextmanager
def _three() -> Iterator[tuple[Fleet, dict[str, Fleet]]]:
    """An aggregated worker, and a pair of each dialect."""
    with contextlib.ExitStack() as stack:
        whole = stack.enter_context(fleet(0, 0, aggregated=1))
        pairs = {name: stack.enter_context(fleet(1, 1, worker_args=("--dialect", name))) for name in DIALECTS}
        yield whole, pairs


async def _compare(urls: dict[str, str], options: argparse.Namespace) -> None:
    writer = Writer(tokenizer(), random.Random(options.seed), plain=True)
    print("time to first token, medians, ms; in brackets what the pair adds")
    print(f"  {'tokens':>7}{'repeats':>9}" + "".join(f"{name:>20}" for name in urls))
    async with client(1) as http:
        for length in [options.lengths[0]] * WARM_UPS + [max(options.lengths)]:
            await _turn(http, urls, writer.text(length), 0)
        for length, repeats in zip(options.lengths, options.repeats, strict=True):
            turns = [await _turn(http, urls, writer.text(length), number) for number in range(repeats)]
            medians = {name: statistics.median(turn[name] for turn in turns) * 1e3 for name in urls}
            base = medians.pop("aggregated")
            shown = "".join(f"{f'{ms:.1f} ({ms - base:+.1f})':>20}" for ms in medians.values())
            print(f"  {length:>7}{repeats:>9}{base:>20.1f}{shown}", flush=True)
    print(flush=True)


async def _turn(http: httpx.AsyncClient, urls: dict[str, str], text: str, number: int) -> dict[str, float]:
    """One prompt to all; who is first changes with `number`."""
    names = list(urls)
    first = number % len(names)
    body = {"prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    found: dict[str, float] = {}
    for name in names[first:] + names[:first]:
        answer: Answer = await ask(http, urls[name], "completions", body)
        if answer.outcome.error or answer.first_content_s is None:
            raise SystemExit(f"no first token from {name}: {answer.outcome}")
        found[name] = answer.first_content_s
    return found


# --- one dialect ------------------------------------------------------------------------------------------------------


async def _one_dialect(dialect: str, made: Fleet, options: argparse.Namespace) -> list[str]:
    parts: list[Rows] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dialects-")))
        prefill, decode = made.workers
        sides = OurSide("prefill", prefill.url), OurSide("decode", decode.url)
        bootstrap = prefill.arguments[prefill.arguments.index("--bootstrap-port") + 1]
        pair, _ = await by_ours(stack, folder, sides, ("--log-level", "warning"), bootstrap)
        if "leaving" in options.parts:
            parts.append(Rows(f"{dialect}: the client leaves"))
            await leave_in_each(parts[-1], pair, BACK_LIMIT_S, options.seed)
        if "deaths" in options.parts:
            parts.append(Rows(f"{dialect}: a worker dies or freezes under a request"))
            await _Deaths(parts[-1], made, pair, options.seed).run()
    faults = [f"{rows.title}: {rows.failed} rows not right" for rows in parts if rows.failed]
    faults += [f"{dialect}: {what}" for what in wait_idle(made, BACK_LIMIT_S)[1]]
    return faults + [f"{dialect}: {line}" for line in errors_logged(made.all)]


@dataclasses.dataclass(frozen=True)
class _Death:
    role: str
    how: str
    under: str
    comes: Callable[[Pair, Call], Awaitable[None]]


async def _computes(pair: Pair, call: Call) -> None:
    await pair.prefill_gate.asked.wait()
    await asyncio.sleep(0.1)


async def _streams(pair: Pair, call: Call) -> None:
    while call.tokens < 4 and not call.ended_at:  # noqa: ASYNC110  (it is read by another task)
        await asyncio.sleep(0.005)


DEATHS = tuple(
    _Death(role, how, under, comes)
    for role, under, comes in (("prefill", "while it computes", _computes), ("decode", "while it streams", _streams))
    for how in ("killed", "frozen")
)


class _Deaths:
    def __init__(self, rows: Rows, made: Fleet, pair: Pair, seed: int) -> None:
        self._rows, self._made, self._pair = rows, made, pair
        self._writer = Writer(tokenizer(), random.Random(seed), plain=True)

    async def run(self) -> None:
        for death in DEATHS:
            await self._one(death)

    async def _one(self, death: _Death) -> None:
        [prefill], [decode] = self._made.prefills, self._made.decodes
        victim = prefill if death.role == "prefill" else decode
        self._pair.reset()
        call = Call(self._pair.front, PATHS["completions"], self._body())
        await call.send()
        reading = asyncio.create_task(call.read_all())
        async with asyncio.timeout(KNOWN_LIMIT_S):
            await death.comes(self._pair, call)
        victim.send(signal.SIGKILL if death.how == "killed" else signal.SIGSTOP)
        at = time.time()
        await asyncio.wait([reading], timeout=KNOWN_LIMIT_S)
        call.close()
        answer = told(call)
        late_s = (call.ended_at or time.time()) - at
        coded = bool(answer.error) and not answer.error.startswith("None") and not call.broken
        self._rows.add(
            f"{death.role} {death.how} {death.under}",
            "an error with a code",
            f"{answer.status} {answer.error[:150]} after {late_s:.2f} s",
            coded,
        )
        await self._again(victim, death)

    async def _again(self, victim: Process, death: _Death) -> None:
        if death.how == "killed":
            victim.kill()  # reaped
            victim.start()
        else:
            victim.send(signal.SIGCONT)
        await asyncio.to_thread(victim.wait_ready)
        until = time.monotonic() + KNOWN_LIMIT_S
        left = ["no look yet"]
        while left and time.monotonic() < until:
            _, left = await asyncio.to_thread(wait_idle, self._made, BACK_LIMIT_S)
        self._rows.add(f"{death.role} {death.how}: afterwards", "idle", "; ".join(left) or "idle", not left)
        await asyncio.to_thread(Process("router", [], self._pair.front, Path()).wait_ready, "/ready")

    def _body(self) -> dict[str, object]:
        return {
            "model": MODEL,
            "prompt": self._writer.ids(700),
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="[all]")
    parser.add_argument("--lengths", type=_numbers, default="64,512,2000", help="prompt tokens [64,512,2000]")
    parser.add_argument("--repeats", type=_numbers, default="15,9,5", help="of each length [15,9,5]")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts [1]")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
