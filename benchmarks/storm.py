"""The storm of bench-cancel: many requests, each dropped in a phase of its life, by closing or by an abort call, and
how soon its pages were free on each side, from the workers' own records."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from typing import Any

from client import Call, get, post
from fleet import Fleet, Process
from idle import errors_logged, not_idle, wait_idle
from prompts import Writer, log_uniform, shares, tokenizer

PATH = "/v1/completions"
ABORT_ANSWER_LIMIT_S = 2.0
AIM_S = 0.150
IDLE_LIMIT_S = 1.0
LONGEST = 600  # tokens
STORM_LIMIT_S = 75.0
"""After it no new request is made: the three transports together must have an end in time."""

MOMENTS = (
    ("at once", 5), ("timed", 9), ("queued at prefill", 5), ("computing", 8), ("moving", 8),
    ("waiting for the batch", 6), ("first byte", 6), ("mid-stream", 10), ("last byte", 5),
)  # fmt: skip
"""When a client means to leave, and how many parts of them do."""

STATES = {
    "queued at prefill": ("decode", "Granted"),
    "computing": ("prefill", "Streaming"),
    "moving": ("prefill", "moving"),
    "waiting for the batch": ("decode", "Success"),
}
"""What a worker's record says when such a moment has come; the client leaves a random moment later."""

PHASES = (
    "before headers", "waiting for pages", "queued at prefill", "computing", "moving", "waiting for the batch",
    "running, no byte yet", "first byte", "mid-stream", "last byte", "over already",
)  # fmt: skip


@dataclasses.dataclass
class Drop:
    """One request to be dropped, and what became of it. Times are Unix seconds."""

    call: Call
    moment: str
    by_abort: bool
    after_s: float
    after_tokens: int
    dropped_at: float = 0.0
    seen_tokens: int = 0
    seen_finish: bool = False
    fault: str = ""
    phase: str = ""
    freed_s: dict[str, float] = dataclasses.field(default_factory=dict)  # by side, since the drop
    over_s: dict[str, float] = dataclasses.field(default_factory=dict)


async def answer(url: str, prompt: list[int], most: int) -> tuple[int, str, str]:
    """(status, text, how it ended: a finish reason, or what was wrong)."""
    call = Call(url, PATH, body(prompt, most, stream=True))
    await call.send()
    await call.read_all()
    return call.status, call.text, call.finish or str(call.error.get("message", call.broken))


def body(prompt: list[int], most: int, *, stream: bool) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": stream, "ignore_eos": True}


@dataclasses.dataclass
class Result:
    """p99_s: from disconnect to free pages, by side."""

    p99_s: dict[str, float]
    idle_s: float
    faults: list[str]


async def live(running: Fleet, requests: int, concurrency: int, rng: random.Random) -> Result:
    """A reference run; the storm; every figure back within IDLE_LIMIT_S; the reference prompts answered as before."""
    assert running.router is not None
    url = running.router.url
    writer = Writer(tokenizer(), rng, plain=True)
    known = [(writer.ids(tokens), rng.randint(4, 16)) for tokens in log_uniform(20, 16, 300, rng)]
    expected = [await answer(url, prompt, most) for prompt, most in known]
    drops = plan(url, writer, requests, rng)
    print(f"{requests} requests at concurrency {concurrency}, each dropped", flush=True)
    asked = drops
    drops = await storm(running, asked, concurrency)
    if len(drops) < len(asked):
        print(f"{len(drops)} of {len(asked)} within {STORM_LIMIT_S:g} s")
    last = max(drop.dropped_at for drop in drops)
    _, left = await asyncio.to_thread(wait_idle, running, 10.0)
    idle_s = time.time() - last
    faults = [drop.fault for drop in drops if drop.fault]
    if 2 * len(drops) < len(asked):
        faults.append(f"no more than {len(drops)} of {len(asked)} requests could be dropped in {STORM_LIMIT_S:g} s")
    faults += [f"not idle {idle_s:.1f} s after the last drop: {what}" for what in left]
    if idle_s > IDLE_LIMIT_S:
        faults.append(f"idle {idle_s:.2f} s after the last drop, the limit is {IDLE_LIMIT_S:g} s")
    print(f"all figures idle {idle_s * 1000:.0f} ms after the last drop (limit {IDLE_LIMIT_S * 1000:.0f} ms)")
    for drop in drops:
        await look_up(running, drop)
    p99_s = report(drops)
    faults += [
        f"{side}: p99 {p99 * 1000:.0f} ms, the aim is {AIM_S * 1000:.0f} ms"
        for side, p99 in p99_s.items()
        if p99 > AIM_S
    ]
    faults += await long_prompt_left(running, url, writer)
    after = await asyncio.gather(*(answer(url, prompt, most) for prompt, most in known))
    wrong = sum(a != b for a, b in zip(expected, after, strict=True))
    print(f"{len(known) - wrong} of {len(known)} prompts answered as before, at concurrency {len(known)}")
    if wrong:
        faults.append(f"{wrong} of {len(known)} answers differ from the undisturbed run")
    await asyncio.to_thread(wait_idle, running, 5.0)
    return Result(p99_s, idle_s, faults + not_idle(running) + errors_logged(running.all))


# --- the storm --------------------------------------------------------------------------------------------------------


def plan(url: str, writer: Writer, count: int, rng: random.Random) -> list[Drop]:
    drops = []
    lengths = log_uniform(count, 16, LONGEST, rng)
    for number, moment in enumerate(shares(count, MOMENTS, rng)):
        most = rng.randint(24, 96)
        stream = moment in ("first byte", "mid-stream", "last byte") or rng.random() < 0.7
        after_s = 0.02 * 600 ** rng.random() if moment == "timed" else rng.uniform(0.0, 0.006)
        after_tokens = {"first byte": 1, "mid-stream": rng.randint(2, most - 1), "last byte": most}.get(moment, 0)
        tokens = min(lengths[number], 64) if moment == "waiting for the batch" else lengths[number]
        call = Call(url, PATH, body(writer.ids(tokens), most, stream=stream), label=f"drop-{number}")
        drops.append(Drop(call, moment, rng.random() < 0.3, after_s, after_tokens))
    return drops


async def storm(running: Fleet, drops: list[Drop], concurrency: int) -> list[Drop]:
    """Those that were made within the limit."""
    waiting, made = iter(drops), list[Drop]()
    until = time.monotonic() + STORM_LIMIT_S

    async def client() -> None:
        for drop in waiting:
            if time.monotonic() > until:
                return
            made.append(drop)
            try:
                await ask_and_leave(running, drop)
            except OSError as error:
                drop.fault = f"{drop.call.label}: {error}"

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return made


async def ask_and_leave(running: Fleet, drop: Drop) -> None:
    call = drop.call
    await call.send()
    reading = asyncio.create_task(_read_until(drop))
    if drop.moment in STATES:
        await _until_state(running, drop)
    # The clock runs for all of them: who means to see bytes and sees none for long leaves from the queue.
    await asyncio.wait({reading}, timeout=drop.after_s if not drop.after_tokens else 60.0)
    drop.seen_tokens, drop.seen_finish = call.tokens, bool(call.finish)
    if drop.by_abort and not call.ended_at:
        await _abort(drop)
        await asyncio.wait({reading}, timeout=ABORT_ANSWER_LIMIT_S)
        rest = asyncio.create_task(call.read_all()) if reading.done() else reading
        await asyncio.wait({rest}, timeout=ABORT_ANSWER_LIMIT_S)
        _check_aborted(drop)
    else:
        drop.dropped_at = call.close()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    call.close()


async def _read_until(drop: Drop) -> None:
    """Until the client has seen as many tokens as it wanted; to the end where it wanted none, or has aborted."""
    while await drop.call.read_some():
        if drop.after_tokens and drop.call.tokens >= drop.after_tokens and not drop.dropped_at:
            return


async def _until_state(running: Fleet, drop: Drop) -> None:
    """Until a worker has noted the state that the client waits for, or the answer is over."""
    assert running.router is not None
    side, state = STATES[drop.moment]
    worker = running.prefills[0] if side == "prefill" else running.decodes[0]
    _, record = await get(running.router.url, f"/requests/{drop.call.label}")
    while not drop.call.ended_at:
        for attempt in record["attempts"]:
            if state in [found for _, found in await timeline(worker, attempt["rids"][0])]:
                return
        await asyncio.sleep(0.02)


async def _abort(drop: Drop) -> None:
    """By the router's own id where the client has been told it, else by the client's label."""
    drop.dropped_at = time.time()
    name = drop.call.headers.get("x-request-id", drop.call.label)
    status, said = await post(drop.call.url, "/abort_request", {"rid": name})
    if status != 200 or said["aborted"] not in (0, 1):
        drop.fault = f"{drop.call.label}: the abort call for {name} was answered {status}: {said}"


def _check_aborted(drop: Drop) -> None:
    call = drop.call
    took = (call.ended_at or time.time()) - drop.dropped_at
    if not call.ended_at or took > ABORT_ANSWER_LIMIT_S:
        drop.fault = drop.fault or f"{call.label}: no end within {took:.1f} s of its abort"
    elif not call.finish and call.error.get("code") != "aborted":
        drop.fault = drop.fault or f"{call.label}: aborted, and answered {call.status} {call.error} {call.broken}"


async def long_prompt_left(running: Fleet, url: str, writer: Writer) -> list[str]:
    """A short prompt right after a long one was left during its prefill must not wait for dead work."""

    async def short() -> float:
        call = Call(url, PATH, body(writer.ids(16), 1, stream=True))
        await call.send()
        await call.read_all()
        return call.first_byte_at - call.sent_at

    solo_s = await short()
    long = Call(url, PATH, body(writer.ids(3000), 8, stream=True))
    await long.send()
    await asyncio.sleep(1.0)
    long.close()
    behind_s = await short()
    _, left = await asyncio.to_thread(wait_idle, running, 2.0)
    print(f"16 tokens right after 3,000 were left in prefill: first byte {behind_s:.2f} s, alone {solo_s:.2f} s")
    late = [f"the short prompt waited {behind_s:.2f} s, alone {solo_s:.2f} s"] if behind_s > solo_s + 2.0 else []
    return late + left


# --- what the workers recorded ----------------------------------------------------------------------------------------


async def look_up(running: Fleet, drop: Drop) -> None:
    assert running.router is not None
    status, record = await get(running.router.url, f"/requests/{drop.call.label}")
    timelines: dict[str, list[tuple[float, str]]] = {"prefill": [], "decode": []}
    if status == 200:
        for side, worker in (("prefill", running.prefills[0]), ("decode", running.decodes[0])):
            for attempt in record["attempts"]:
                timelines[side] += await timeline(worker, attempt["rids"][0])
    for side, entries in timelines.items():
        freed = [at for at, state in entries if state == "freed"]
        if freed and freed[-1] > drop.dropped_at:
            drop.freed_s[side] = freed[-1] - drop.dropped_at
        if entries and entries[-1][0] > drop.dropped_at:
            drop.over_s[side] = entries[-1][0] - drop.dropped_at
    drop.phase = phase_of(drop, *(timelines[side] for side in ("prefill", "decode")))


async def timeline(worker: Process, rid: str) -> list[tuple[float, str]]:
    """(Unix time, state), in order; empty where the worker never had the leg."""
    status, told = await get(worker.url, f"/requests/{rid}")
    if status != 200:
        return []
    return [(leg["started_unix_s"] + entry["at_s"], entry["state"]) for leg in told["legs"] for entry in leg["entries"]]


def phase_of(drop: Drop, prefill: list[tuple[float, str]], decode: list[tuple[float, str]]) -> str:
    """Where the request was when its client left."""
    at_prefill = {state for at, state in prefill if at <= drop.dropped_at}
    at_decode = {state for at, state in decode if at <= drop.dropped_at}
    if drop.call.complete and not drop.by_abort:
        return "over already"
    if drop.seen_finish:
        return "last byte"
    if drop.seen_tokens:
        return "first byte" if drop.seen_tokens == 1 else "mid-stream"
    if "running" in at_decode:
        return "running, no byte yet"
    if "Success" in at_decode:
        return "waiting for the batch"
    if {"moving", "Flushing", "Sent"} & at_prefill:
        return "moving"
    if "Streaming" in at_prefill:
        return "computing"
    if "Granted" in at_decode or "Armed" in at_prefill:
        return "queued at prefill"
    return "waiting for pages" if at_decode or at_prefill else "before headers"


def report(drops: list[Drop]) -> dict[str, float]:
    """Prints what happened in each phase; p99 of the time from disconnect to free pages, by side."""
    print(f"\n{'from disconnect to pages free, ms':36}{'prefill':>40}{'decode':>40}")
    print(f"{'phase':24}{'dropped':>8}{'':4}" + 2 * f"{'n':>8}{'p50':>8}{'p90':>8}{'p99':>8}{'max':>8}")
    for phase in PHASES:
        of_phase = [drop for drop in drops if drop.phase == phase]
        if of_phase:
            print(f"{phase:24}{len(of_phase):8}{'':4}" + "".join(_columns(of_phase, side) for side in SIDES))
    print(f"{'all':24}{len(drops):8}{'':4}" + "".join(_columns(drops, side) for side in SIDES))
    p99_s = {side: _quantile([drop.freed_s[side] for drop in drops if side in drop.freed_s], 0.99) for side in SIDES}
    for side, p99 in p99_s.items():
        over = [drop.over_s[side] for drop in drops if side in drop.over_s]
        print(
            f"{side}: p99 {p99 * 1000:.0f} ms, aim {AIM_S * 1000:.0f} ms: {'met' if p99 < AIM_S else 'missed'}; "
            f"the request itself over: p99 {_quantile(over, 0.99) * 1000:.0f} ms"
        )
    aborted = sum(drop.by_abort for drop in drops)
    print(f"{len(drops) - aborted} by closing, {aborted} by abort call\n")
    return p99_s


SIDES = ("prefill", "decode")


def _columns(drops: list[Drop], side: str) -> str:
    times = [drop.freed_s[side] for drop in drops if side in drop.freed_s]
    if not times:
        return f"{'-':>8}" + " " * 32
    return f"{len(times):8}" + "".join(f"{_quantile(times, q) * 1000:8.0f}" for q in (0.5, 0.9, 0.99, 1.0))


def _quantile(values: list[float], q: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))] if ranked else 0.0
