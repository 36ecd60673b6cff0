"""Field cases about requests that are left: H01, H02, H13, H18."""

from __future__ import annotations

import asyncio
import random
import time

from client import Call, get, post
from fleet import Fleet
from idle import wait_idle
from load import PATH, Asked, Known, ask, learn
from prompts import Writer, tokenizer
from verdicts import Verdicts

LONG_PROMPT = 6_000
SHORT_EXTRA_S, FREE_LIMIT_S = 2.0, 5.0
TAGGED, AT_ONCE, SHARE = 96, 32, 0.3
SPREAD_REQUESTS, SPREAD = 40, 0.6


async def one_pair(running: Fleet, verdicts: Verdicts, rng: random.Random) -> None:
    writer = Writer(tokenizer(), rng, plain=True)
    await _long_prefill(running, verdicts, writer)
    await _exact_abort(running, verdicts, writer)


async def _long_prefill(running: Fleet, verdicts: Verdicts, writer: Writer) -> None:
    """A client leaves in a long prefill; the next one must not wait for dead work."""
    assert running.router is not None
    url, [prefill] = running.router.url, running.prefills

    async def short() -> tuple[Call, float]:
        call = Call(url, PATH, _body(writer.ids(16), 4))
        await call.send()
        await call.read_all()
        return call, call.first_byte_at - call.sent_at

    _, alone_s = await short()
    cancelled = prefill.metric("pdplane_finished_total")
    long = Call(url, PATH, _body(writer.ids(LONG_PROMPT), 64), label="long-one")
    await long.send()
    await asyncio.sleep(1.0)
    left_at = time.monotonic()
    long.close()
    call, behind_s = await short()
    verdicts.say(
        "H01 a short prompt behind an abandoned one does not wait for it",
        call.status == 200 and not call.error and behind_s <= alone_s + SHORT_EXTRA_S,
        f"{behind_s:.2f} s, alone {alone_s:.2f} s",
    )
    _, left = await asyncio.to_thread(wait_idle, running, FREE_LIMIT_S)
    verdicts.none(f"H01 both sides are back {time.monotonic() - left_at:.1f} s after the close", left)
    ends = prefill.metric_by("pdplane_finished_total", "what")
    [rid] = running.router.record("long-one")["attempts"][0]["rids"]
    record = prefill.record(rid) or {"legs": []}
    states = [entry["state"] for leg in record["legs"] for entry in leg["entries"]]
    good = prefill.metric("pdplane_finished_total") > cancelled and "Streaming" in states
    verdicts.say("H01 the cancel is counted, and its record names the stage", good, f"{ends}; {states}")


async def _exact_abort(running: Fleet, verdicts: Verdicts, writer: Writer) -> None:
    assert running.router is not None
    url = running.router.url
    [known] = await learn(running, [Known(writer.ids(20), 80)])
    for first, other in (("a", "ab"), ("ab", "a")):
        calls = {name: Call(url, PATH, _body(known.prompt, known.most), label=name) for name in (first, other)}
        for call in calls.values():
            await call.send()
        reading = [asyncio.create_task(call.read_all()) for call in calls.values()]
        while not all(call.tokens > 2 for call in calls.values()):  # noqa: ASYNC110  (the clients' own count)
            await asyncio.sleep(0.02)
        said = [await post(url, "/abort_request", {"rid": rid}) for rid in ("", "nobody", "a")]
        await asyncio.gather(*reading)
        codes = [(status, told.get("aborted")) for status, told in said]
        good = codes == [(400, None), (200, 0), (200, 1)]
        verdicts.say(f"H02 {first} then {other}: an empty rid is 400, an unknown one a no-op", good, codes)
        kept, ended = calls["ab"], calls["a"]
        good = (kept.text, kept.finish) == (known.text, known.finish)
        verdicts.say(
            f"H02 {first} then {other}: the text of ab is its own", good, f"{kept.finish}, {kept.tokens} tokens"
        )
        good = ended.error.get("code") == "aborted" and known.text.startswith(ended.text)
        verdicts.say(f"H02 {first} then {other}: a ends, aborted", good, ended.error.get("code"))


def _body(prompt: list[int], most: int) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True, "ignore_eos": True}


# --- tags -------------------------------------------------------------------------------------------------------------


async def tagged(running: Fleet, verdicts: Verdicts, rng: random.Random) -> None:
    """Prompts that hold a tag of their own, pools so small that pages are reused all the time, a third dropped."""
    assert running.router is not None
    url, writer = running.router.url, Writer(tokenizer(), rng, plain=True)
    words = tokenizer()
    tags = [f"tag-{rng.randrange(10**6):06d}" for _ in range(12)]
    wanted = [
        Known(words.encode(f"Repeat {tag}. {writer.text(rng.randint(8, 60))} {tag} {tag}"), rng.randint(8, 32))
        for tag in tags
    ]
    known = await learn(running, wanted)
    watch = asyncio.create_task(_watch_loads(running))
    asked: list[Asked] = []
    dropped = await _storm(url, known, asked, rng)
    await asyncio.to_thread(wait_idle, running, 5.0)
    watch.cancel()
    [faults] = await asyncio.gather(watch, return_exceptions=True)
    survivors = [one for one in asked if one.whole]
    lost = [f"{one.code or one.call.broken} {one.call.status}" for one in asked if not one.whole]
    wrong = [fault for one in survivors if (fault := one.fault())]
    retracted = sum(decode.metric("pdplane_retracted_total") for decode in running.decodes)
    verdicts.none(f"H13 {len(survivors)} survivors of {TAGGED} (dropped: {dropped}) equal their own text", wrong + lost)
    verdicts.say("H13 pages were scarce", retracted > 0, f"{retracted:.0f} requests retracted meanwhile")
    verdicts.none("H18 no load was ever below zero", faults if isinstance(faults, list) else [])
    _, left = await asyncio.to_thread(wait_idle, running, 5.0)
    verdicts.none("H18 all counters are exactly zero after drops in every phase", left)
    await _spread(running, known, verdicts)


async def _storm(url: str, known: list[Known], asked: list[Asked], rng: random.Random) -> int:
    """Asks TAGGED requests, AT_ONCE at a time; how many were dropped, at random moments."""
    waiting = [known[i % len(known)] for i in range(TAGGED)]
    dropped = 0

    async def client() -> None:
        nonlocal dropped
        while waiting:
            one = waiting.pop()
            if rng.random() >= SHARE:
                await ask(url, one, asked)
                continue
            dropped += 1
            call = Call(url, PATH, _body(one.prompt, one.most))
            await call.send()
            reading = asyncio.create_task(call.read_all())
            await asyncio.wait({reading}, timeout=0.01 * 500 ** rng.random())
            call.close()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return dropped


async def _watch_loads(running: Fleet) -> list[str]:
    """Until cancelled: what a scrape of the router saw below zero."""
    assert running.router is not None
    found: list[str] = []
    try:
        while True:
            _, told = await get(running.router.url, "/workers")
            found += [f"{one['url']}: load {one['load']}" for one in told["workers"] if one["load"] < 0]
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        return found


async def _spread(running: Fleet, known: list[Known], verdicts: Verdicts) -> None:
    """The next requests go to all workers alike."""
    assert running.router is not None
    url = running.router.url

    async def legs() -> dict[str, int]:
        _, told = await get(url, "/workers")
        return {one["url"]: one["requests"] for one in told["workers"]}

    before = await legs()
    for start in range(0, SPREAD_REQUESTS, 4):
        await asyncio.gather(*(ask(url, known[(start + i) % len(known)]) for i in range(4)))
    after = await legs()
    for side, workers in (("prefill", running.prefills), ("decode", running.decodes)):
        counts = [after[worker.url] - before[worker.url] for worker in workers]
        good = max(counts) <= SPREAD * sum(counts)
        verdicts.say(f"H18 the next {SPREAD_REQUESTS} requests are spread over {side}s", good, counts)
