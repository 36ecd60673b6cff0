"""Field cases about what is answered: H06 to H09, H14, H15, H20, each beside one aggregated worker."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import httpx
from fleet import Fleet
from idle import wait_idle
from prompts import Writer, tokenizer
from verdicts import Verdicts

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
HELD_LIMIT_S = 1.0
REFUSED_LIMIT_S = 1.0
GREEDY: dict[str, Any] = {"temperature": 0}
PROMPT = "The water in the river is"

BAD: dict[str, tuple[str, Any]] = {
    "an unknown model": (COMPLETIONS, {"prompt": "x", "model": "gpt-4"}),
    "temperature -1": (COMPLETIONS, {"prompt": "x", "temperature": -1}),
    "a field of a wrong type": (CHAT, {"messages": "hello"}),
    "malformed JSON": (CHAT, b'{"messages": ['),
    "an invalid tool schema": (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": 3}]}),
    "a template error": (CHAT, {"messages": [{"role": "tool", "content": "x"}], "max_tokens": 2, **GREEDY}),
    "an empty prompt": (COMPLETIONS, {"prompt": "", "max_tokens": 2, **GREEDY}),
    "a blank prompt": (COMPLETIONS, {"prompt": " ", "max_tokens": 2, **GREEDY}),
    "no prompts": (COMPLETIONS, {"prompt": []}),
    "a prompt without ids": (COMPLETIONS, {"prompt": [[]]}),
    "no messages": (CHAT, {"messages": []}),
    "a token id above the vocabulary": (COMPLETIONS, {"prompt": [5, 10_000_000]}),
    "max_tokens 0": (COMPLETIONS, {"prompt": "x", "max_tokens": 0}),
    "max_tokens -1": (COMPLETIONS, {"prompt": "x", "max_tokens": -1}),
}


class Both:
    """The same request through the pair and to the aggregated worker."""

    def __init__(self, running: Fleet, http: httpx.AsyncClient) -> None:
        assert running.router is not None
        self.running = running
        self.pair, self.whole = running.router.url, running.aggregated[0].url
        self.http = http

    async def ask(self, path: str, body: Any) -> tuple[httpx.Response, httpx.Response]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return (
            await self.http.post(self.pair + path, content=content, headers=headers),
            await self.http.post(self.whole + path, content=content, headers=headers),
        )

    async def same(self, path: str, body: dict[str, Any]) -> tuple[bool, list[Any]]:
        """(alike in all but what is cached, the choices of the pair)"""
        seen = [essence(answer) for answer in await self.ask(path, body)]
        return seen[0] == seen[1], seen[0]["choices"]


def essence(answer: httpx.Response) -> dict[str, Any]:
    """Status, choices (index, text, finish, matched stop) and counts, of a body or of a stream put together."""
    if answer.status_code != 200:
        return {"status": answer.status_code, "error": answer.json()["error"]["code"], "choices": []}
    payloads = events(answer) if "event-stream" in answer.headers["content-type"] else [answer.json()]
    choices: dict[int, list[Any]] = {}
    usage: dict[str, Any] = {}
    for payload in payloads:
        for choice in payload.get("choices", []):
            said = choice.get("message") or choice.get("delta") or choice
            one = choices.setdefault(choice["index"], ["", None, None])
            one[0] += said.get("text", said.get("content")) or ""
            one[1:] = [choice["finish_reason"], choice.get("matched_stop")] if choice["finish_reason"] else one[1:]
        usage = payload.get("usage") or usage
    counts = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    return {"status": 200, "choices": [[i, *choices[i]] for i in sorted(choices)], "counts": counts}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def run(running: Fleet, verdicts: Verdicts, rng: random.Random) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=120.0) as http:
        both = Both(running, http)
        await _one_token(both, verdicts)
        await _stops(both, verdicts)
        await _samples(both, verdicts)
        await _prompts(both, verdicts, rng)
        await _rooms(both, verdicts)
        await _usage(both, verdicts, rng)
        await _refusals(both, verdicts)


async def _one_token(both: Both, verdicts: Verdicts) -> None:
    asks: list[tuple[str, dict[str, Any]]] = []
    for stream in (False, True):
        more = {**GREEDY, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
        chat = [{"role": "user", "content": "Say a word."}]
        asks += [
            (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1, **more}),
            (CHAT, {"messages": chat, "max_tokens": 1, **more}),
            (CHAT, {"messages": chat, "max_completion_tokens": 1, **more}),
        ]
    wrong = []
    for path, body in asks:
        alike, choices = await both.same(path, body)
        if not alike or [choice[2] for choice in choices] != ["length"]:
            wrong.append(f"{path} {body}: {choices}")
    verdicts.none(f"H06 one token: {len(asks)} ways, one token, `length`, the aggregated worker's text", wrong)
    min_tokens = {"prompt": PROMPT, "max_tokens": 1, "min_tokens": 1, **GREEDY}
    answers = await both.ask(COMPLETIONS, min_tokens)
    alike = answers[0].status_code == answers[1].status_code
    verdicts.say("H06 min_tokens: as the aggregated worker", alike, answers[0].status_code)
    waited_s, left = await asyncio.to_thread(wait_idle, both.running, HELD_LIMIT_S)
    verdicts.none(f"H06 nothing held {waited_s:.1f} s later", left)


async def _stops(both: Both, verdicts: Verdicts) -> None:
    """T0 T1 are the first two tokens of an answer, as text."""
    sampling = {"max_new_tokens": 6, **GREEDY}
    answer = (await both.http.post(both.whole + GENERATE, json={"text": PROMPT, "sampling_params": sampling})).json()
    ids, words = answer["output_ids"], tokenizer()
    first, second = words.decode(ids[:1]), words.decode(ids[:2])
    cases = {"the first token's text": {"stop": [first]}, "its id": {"stop_token_ids": ids[:1]}}
    cases["a text of two tokens"] = {"stop": [second]}
    for name, stop in cases.items():
        body = {"prompt": PROMPT, "max_tokens": 12, **GREEDY, **stop}
        alike, choices = await both.same(COMPLETIONS, body)
        [(_, text, finish, _)] = choices
        verdicts.say(f"H07 stop at {name}: as the aggregated worker", alike and finish == "stop" and not text, choices)


async def _samples(both: Both, verdicts: Verdicts) -> None:
    """n=3, many at once; then one of three is aborted."""
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 6, "temperature": 1.0, "seed": 7}
    expected = essence((await both.ask(COMPLETIONS, body))[1])
    streams = [
        {**body, "stream": bool(i % 2), **({"stream_options": {"include_usage": True}} if i % 2 else {})}
        for i in range(16)
    ]
    answers = await asyncio.gather(*(both.http.post(both.pair + COMPLETIONS, json=one) for one in streams))
    wrong = [f"{seen}" for answer in answers if (seen := essence(answer)) != expected]
    verdicts.none("H08 n=3, 16 at once: three choices each, the aggregated worker's", wrong)
    rooms = []
    for answer in answers:
        record = (await both.http.get(f"{both.pair}/requests/{answer.headers['x-request-id']}")).json()
        rooms += [room for attempt in record["attempts"] for room in attempt["rooms"]]
    verdicts.say("H08 no room is used twice", len(rooms) == len(set(rooms)) == 48, f"{len(set(rooms))} rooms")
    await _abort_one_sample(both, verdicts)


async def _abort_one_sample(both: Both, verdicts: Verdicts) -> None:
    long = {"prompt": PROMPT, "n": 3, "max_tokens": 60, "ignore_eos": True, **GREEDY}
    headers = {"x-request-id": "three-samples"}
    asking = asyncio.create_task(both.http.post(both.pair + COMPLETIONS, json=long, headers=headers))
    rids: list[str] = []
    decode = both.running.decodes[0].url
    for _ in range(200):
        record = await both.http.get(f"{both.pair}/requests/three-samples")
        rids = record.json()["attempts"][0]["rids"] if record.status_code == 200 else []
        if rids and (await both.http.get(f"{decode}/server_info")).json()["figures"]["running"] == 3:
            break
        await asyncio.sleep(0.02)
    told = (await both.http.post(f"{decode}/abort_request", json={"rid": rids[1]})).json()
    seen = essence(await asking)
    finishes = [choice[2] for choice in seen["choices"]]
    good = told == {"aborted": 1} and finishes == ["length", "abort", "length"]
    verdicts.say("H08 one sample of three aborted: it says so, the others end", good, f"{told} {finishes}")


async def _prompts(both: Both, verdicts: Verdicts, rng: random.Random) -> None:
    writer = Writer(tokenizer(), rng, plain=True)
    texts = [writer.text(rng.randint(4, 40)) for _ in range(33)]
    ids = [writer.ids(rng.randint(4, 40)) for _ in range(12)]
    for name, prompts in (("33 texts", texts), ("12 lists of ids", ids)):
        alike, choices = await both.same(COMPLETIONS, {"prompt": prompts, "max_tokens": 2, **GREEDY})
        good = alike and [choice[0] for choice in choices] == list(range(len(prompts)))
        verdicts.say(f"H09 {name}: in order, the aggregated worker's", good, f"{len(choices)} choices")
    over = [*texts[:10], " ".join(["water"] * 9_000), *texts[11:]]
    answer, _ = await both.ask(COMPLETIONS, {"prompt": over, "max_tokens": 2})
    good = answer.status_code == 400 and "10" in answer.text
    verdicts.say("H09 one too long: 400 that names its place", good, answer.text[:200])


async def _rooms(both: Both, verdicts: Verdicts) -> None:
    """The same room twice, straight to the engines."""
    prefill, decode = both.running.prefills[0], both.running.decodes[0]
    port = int(prefill.arguments[prefill.arguments.index("--bootstrap-port") + 1])

    async def legs(prompt: str, room: object) -> list[httpx.Response]:
        body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, **GREEDY}
        body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        both_urls = (prefill.url, decode.url)
        return list(await asyncio.gather(*(both.http.post(url + COMPLETIONS, json=body) for url in both_urls)))

    alone = essence(
        await both.http.post(
            both.whole + COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, **GREEDY}
        )
    )
    first = asyncio.create_task(legs(PROMPT, 4711))
    await asyncio.sleep(0.1)
    second = await legs("Another one", 4711)
    seen = essence((await first)[1])
    verdicts.say("H14 a room in use: the first is right", seen == alone, seen["choices"])
    codes = [leg.status_code for leg in second]
    verdicts.say("H14 a room in use: the second is refused", codes == [409, 409], codes)
    again = [leg.status_code for leg in await legs("And again", 4711)]
    verdicts.say("H14 a room that was used: refused", again == [409, 409], again)
    bad = {str(room): [leg.status_code for leg in await legs("x", room)] for room in (0, -1, 2**63, "seven")}
    verdicts.say("H14 bad rooms: 400", all(codes == [400, 400] for codes in bad.values()), bad)
    after = await legs(PROMPT, 4712)
    verdicts.say("H14 both processes live on", essence(after[1]) == alone, essence(after[1])["choices"])


async def _usage(both: Both, verdicts: Verdicts, rng: random.Random) -> None:
    body = {"prompt": Writer(tokenizer(), rng, plain=True).text(70), "max_tokens": 4, **GREEDY}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    first, _ = await both.ask(COMPLETIONS, streamed)
    second, _ = await both.ask(COMPLETIONS, streamed)
    third, _ = await both.ask(COMPLETIONS, body)
    told = [[event["usage"] for event in events(answer) if event.get("usage")] for answer in (first, second)]
    last = all(events(answer)[-1].get("usage") for answer in (first, second))
    verdicts.say("H15 usage once, in the last event", [len(one) for one in told] == [1, 1] and last, told)
    counts = [
        (one["prompt_tokens"], one["completion_tokens"]) for one in (told[0][0], told[1][0], third.json()["usage"])
    ]
    verdicts.say("H15 counts as without a stream", len(set(counts)) == 1, counts[0])
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in (told[0][0], told[1][0], third.json()["usage"])]
    good = cached[0] == 0 and 0 < cached[1] == cached[2] < 70
    verdicts.say("H15 cached_tokens: 0 first, then the hit, never the whole prompt", good, cached)
    answers = await both.ask(COMPLETIONS, {**body, "stream": False, "stream_options": {"include_usage": True}})
    codes = [answer.status_code for answer in answers]
    verdicts.say("H15 stream_options without a stream: as the aggregated worker", codes[0] == codes[1], codes)


async def _refusals(both: Both, verdicts: Verdicts) -> None:
    wrong = []
    before = both.running.router.get("/workers")["workers"] if both.running.router else []
    for name, (path, body) in BAD.items():
        started = time.monotonic()
        ours, theirs = await both.ask(path, body)
        took_s = time.monotonic() - started
        alike = ours.status_code == theirs.status_code
        if ours.status_code != 200:
            alike = alike and bool(ours.json()["error"]["message"]) and took_s < 2 * REFUSED_LIMIT_S
        if not alike:
            wrong.append(f"{name}: {ours.status_code} {ours.text[:120]} / {theirs.status_code} in {took_s:.2f} s")
    verdicts.none(f"H20 {len(BAD)} bad or odd requests: the aggregated worker's status, a body, at once", wrong)
    waited_s, left = await asyncio.to_thread(wait_idle, both.running, HELD_LIMIT_S)
    verdicts.none(f"H20 nothing held {waited_s:.1f} s later", left)
    after = both.running.router.get("/workers")["workers"] if both.running.router else []
    failures = [[worker["failures"] for worker in workers] for workers in (before, after)]
    verdicts.say("H20 no worker is blamed", failures[0] == failures[1], failures[1])
