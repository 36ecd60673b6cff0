"""Field cases about limits, busy workers and ranks: H10, H11, H12, H19."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from typing import Any

import httpx
from field_answers import COMPLETIONS, GREEDY, Both, essence
from fleet import Fleet
from idle import wait_idle
from load import Known, ask, learn, seen_by_router
from prompts import Writer, tokenizer
from verdicts import Verdicts

REFUSED_LIMIT_S = 1.0
RANK_REQUESTS = 64


async def capacity(running: Fleet, verdicts: Verdicts, rng: random.Random) -> None:
    """Prompts at the smaller side's limit and over it, over both, and an answer that would outgrow decode's pool."""
    writer = Writer(tokenizer(), rng, plain=True)
    told = {worker.name.split()[0]: worker.get("/server_info")["limits"] for worker in running.workers}
    held = {side: int(told[side]["max_prompt_tokens"]) for side in ("prefill", "decode")}
    side, limit = min(held.items(), key=lambda item: item[1])
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http:
        both = Both(running, http)
        for tokens in (limit - 1, limit):
            alike, choices = await both.same(COMPLETIONS, {"prompt": writer.ids(tokens), "max_tokens": 1, **GREEDY})
            good = alike and len(choices) == 1
            verdicts.say(f"H10 {tokens} tokens, {side} holds {limit}: served, right", good, choices)
        await _refused(both, limit + 1, [limit], writer, verdicts)
        await _refused(both, max(held.values()) + 1, list(held.values()), writer, verdicts)
        if side == "decode":
            body = {"prompt": writer.ids(limit - 1), "max_tokens": 10_000, "ignore_eos": True, **GREEDY}
            answer = await http.post(both.pair + COMPLETIONS, json=body)
            good = essence(answer)["choices"][0][2] == "length"
            verdicts.say("H10 an answer that outgrows decode's pool ends with `length`", good, answer.text[-160:])


async def _refused(both: Both, tokens: int, limits: list[int], writer: Writer, verdicts: Verdicts) -> None:
    """400 naming length and one of the limits that it is over, at once and not tried."""
    assert both.running.router is not None
    started = time.monotonic()
    body = {"prompt": writer.ids(tokens), "max_tokens": 1, **GREEDY}
    answer = await both.http.post(both.pair + COMPLETIONS, json=body)
    took_s = time.monotonic() - started
    named = str(tokens) in answer.text and any(str(limit) in answer.text for limit in limits)
    good = answer.status_code == 400 and named and took_s < REFUSED_LIMIT_S
    claim = f"H10 {tokens} tokens, a limit of {' and '.join(map(str, limits))}: 400 naming both at once"
    verdicts.say(claim, good, f"{took_s:.2f} s {answer.text[:120]}")
    attempts = len((both.running.router.record(answer.headers["x-request-id"]) or {"attempts": []})["attempts"])
    verdicts.say("H10 it was not tried again", attempts <= 1, f"{attempts} attempts")


async def busy_and_gone(running: Fleet, verdicts: Verdicts, rng: random.Random) -> None:
    """One prefill, then both, turn requests away as they drain no further work; then one decode is gone."""
    writer = Writer(tokenizer(), rng, plain=True)
    known = await learn(running, [Known(writer.ids(20), 8) for _ in range(4)])
    await _full_prefill(running, known, verdicts, writer)
    await _dead_decode(running, known, verdicts)


async def _full_prefill(running: Fleet, known: list[Known], verdicts: Verdicts, writer: Writer) -> None:
    """A prefill with a queue of one is full: others serve, nobody is banned; both full: 429 with Retry-After."""
    assert running.router is not None
    first, second = running.prefills
    _restart(first, "--max-queue", "1", "--max-running", "1")
    await asyncio.to_thread(running.router.wait_ready, "/ready")
    filled = asyncio.create_task(_flood(running, first.url, writer))
    await asyncio.sleep(1.0)
    asked = await asyncio.gather(*(ask(running.router.url, known[i % 4]) for i in range(20)))
    bad = [one.fault() or f"{one.call.status} {one.code}" for one in asked if not one.whole or one.fault()]
    verdicts.none("H11 one prefill full: all 20 served by the other", bad)
    retried = [attempt["rooms"][0] for one in asked for attempt in one.attempts]
    verdicts.say("H11 every attempt has a room of its own", len(retried) == len(set(retried)))
    seen = await seen_by_router(running)
    verdicts.say(
        "H11 busy is no failure",
        not seen[first.url]["failures"] and not seen[first.url]["ban"],
        seen[first.url]["failures"],
    )
    filled.cancel()
    await asyncio.gather(filled, return_exceptions=True)
    second.stop()
    filled = asyncio.create_task(_flood(running, first.url, writer))
    await asyncio.sleep(1.0)
    async with httpx.AsyncClient(trust_env=False, timeout=20.0) as http:
        answers = await asyncio.gather(
            *(http.post(running.router.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 1}) for _ in range(6))
        )
    refused = [answer for answer in answers if answer.status_code != 200]
    good = bool(refused) and all(a.status_code == 429 and int(a.headers.get("retry-after", 0)) >= 1 for a in refused)
    verdicts.say("H11 all full: 429 with Retry-After", good, sorted({a.status_code for a in answers}))
    filled.cancel()
    await asyncio.gather(filled, return_exceptions=True)
    second.start()
    await asyncio.to_thread(second.wait_ready)
    _restart(first)


async def _flood(running: Fleet, prefill: str, writer: Writer) -> None:
    """Prefill legs whose decode never comes: they wait until their client leaves, and fill the queue."""
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http:

        async def leg(room: int) -> None:
            body: dict[str, Any] = {"prompt": writer.ids(8), "max_tokens": 1, "bootstrap_room": room}
            while True:
                await http.post(prefill + COMPLETIONS, json=body)
                await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as group:
            for room in range(1_000, 1_004):
                group.create_task(leg(room))


def _restart(process: Any, *extra: str) -> None:
    """With these settings for once; without any, as it was planned."""
    plan = process.arguments
    process.stop()
    process.arguments = [*plan, *extra]
    process.start()
    process.arguments = plan
    process.wait_ready()


async def _dead_decode(running: Fleet, known: list[Known], verdicts: Verdicts) -> None:
    assert running.router is not None
    url, [first, second] = running.router.url, running.decodes
    await asyncio.to_thread(running.router.wait_ready, "/ready")
    first.kill()
    asked = await asyncio.gather(*(ask(url, known[i % 4]) for i in range(20)))
    bad = [one.fault() or f"{one.call.status} {one.code}" for one in asked if not one.whole or one.fault()]
    verdicts.none("H12 one decode gone: all 20 served by the other", bad)
    second.send(signal.SIGKILL)
    started = time.monotonic()
    async with httpx.AsyncClient(trust_env=False, timeout=20.0) as http:
        answer = await http.post(url + COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
    took_s = time.monotonic() - started
    good = answer.status_code in (502, 503) and bool(answer.json()["error"]["message"])
    verdicts.say(
        "H12 both gone: 5xx with a JSON body", good, f"{answer.status_code} in {took_s:.1f} s {answer.text[:120]}"
    )
    for decode in (first, second):
        decode.kill()
        decode.start()
        await asyncio.to_thread(decode.wait_ready)
    await asyncio.to_thread(running.router.wait_ready, "/ready")
    waited_s, left = await asyncio.to_thread(wait_idle, running, 10.0)
    verdicts.none(f"H12 prefill's pages are free ({waited_s:.1f} s after decode was back)", left)


# --- ranks ------------------------------------------------------------------------------------------------------------


async def ranks(running: Fleet, verdicts: Verdicts, rng: random.Random) -> None:
    """64 requests without a rank over dp 2 and dp 4, then explicit ranks, straight to the engines."""
    writer = Writer(tokenizer(), rng, plain=True)
    known = await learn(running, [Known(writer.ids(rng.randint(8, 40)), 4) for _ in range(8)])
    [prefill], [decode] = running.prefills, running.decodes
    assert running.router is not None
    url = running.router.url
    asked = [one for _ in range(4) for one in await asyncio.gather(*(ask(url, known[i % 8]) for i in range(16)))]
    verdicts.none(
        f"H19 {len(asked)} requests without a rank, each right",
        [one.fault() or one.code for one in asked if one.fault() or not one.whole],
    )
    for worker in (prefill, decode):
        steps = worker.metric_by("pdplane_engine_steps_total", "dp")
        verdicts.say(f"H19 every rank of {worker.name} works", all(steps.values()), steps)
    port = int(prefill.arguments[prefill.arguments.index("--bootstrap-port") + 1])
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http:
        both = Both(running, http)
        alone = essence(
            await http.post(both.whole + COMPLETIONS, json={"prompt": "A river", "max_tokens": 3, **GREEDY})
        )

        async def legs(room: int, rank: int) -> list[httpx.Response]:
            body = {"prompt": "A river", "max_tokens": 3, **GREEDY, "bootstrap_room": room}
            body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
            return list(
                await asyncio.gather(
                    http.post(prefill.url + COMPLETIONS, json={**body, "routed_dp_rank": rank}),
                    http.post(decode.url + COMPLETIONS, json={**body, "disagg_prefill_dp_rank": rank}),
                )
            )

        fitting = [essence((await legs(room, room % 2))[1]) for room in range(5_000, 5_008)]
        verdicts.say("H19 an explicit rank that fits is served", all(one == alone for one in fitting), fitting[0])
        codes = [[leg.status_code for leg in await legs(room, 1 - room % 2)] for room in range(6_000, 6_008)]
        verdicts.say(
            "H19 a rank that contradicts its room: 400 on both sides", all(one == [400, 400] for one in codes), codes
        )
