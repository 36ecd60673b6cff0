"""Bad input through the router: the aggregated worker's code and body, nothing allocated, nobody blamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdplane.core.pages import Page

from .fake_engine import spec
from .fleets import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    Fleet,
    Talk,
    chat,
    client,
    completion,
    fleet,
    generate,
    pairing,
    texts,
    until,
)

BAD: dict[str, tuple[str, Any]] = {
    "malformed JSON": (CHAT, b'{"messages": ['),
    "no JSON at all": (COMPLETIONS, b"prompt=hello"),
    "bytes that are no UTF-8": (COMPLETIONS, b'{"prompt": "\xff\xfe"}'),
    "an empty body": (CHAT, b""),
    "JSON that is no object": (COMPLETIONS, b"[1, 2]"),
    "messages of a wrong type": (CHAT, {"messages": "hello"}),
    "a message without a role": (CHAT, {"messages": [{"content": "x"}]}),
    "max_tokens of a wrong type": completion(max_tokens="ten"),
    "stream of a wrong type": completion(stream="yes"),
    "an unknown model": completion(model="gpt-4"),
    "an unknown model in chat": chat(model="gpt-4"),
    "an empty prompt": completion(""),
    "no prompt": (COMPLETIONS, {"max_tokens": 3}),
    "an empty list of prompts": completion([]),
    "an empty list of ids in a list": completion([[]]),
    "mixed prompts": completion(["a", [1]]),
    "an empty text to generate": generate(""),
    "empty messages": (CHAT, {"messages": []}),
    "no messages": (CHAT, {}),
    "a template error": (CHAT, {"messages": [{"role": "tool", "content": "x"}]}),
    "max_tokens 0": completion(max_tokens=0),
    "max_tokens -1": chat(max_tokens=-1),
    "max_completion_tokens 0": chat(max_completion_tokens=0),
    "max_new_tokens 0": generate(max_new_tokens=0),
    "temperature -1": completion(temperature=-1),
    "temperature 9": chat(temperature=9),
    "temperature nan": (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}'),
    "top_p 0": chat(top_p=0),
    "n 0": completion(n=0),
    "n -1": chat(n=-1),
    "n of a wrong type": chat(n="two"),
    "a token id over the vocabulary": completion([5, 100_000]),
    "a negative token id": completion([5, -1]),
    "a token id over the vocabulary in a batch": completion([[5], [100_000]]),
    "an invalid tool schema": chat(tools=[{"type": "function", "function": 3}]),
    "a parameter that is not served": chat(response_format={"type": "json_object"}),
    "a penalty that is not served": completion(presence_penalty=1.5),
    "logprobs over the limit": completion(logprobs=99),
    "stream_options without stream": completion(stream_options={"include_usage": True}),
    "a prompt over the context": completion("x" * 600),
    "one prompt of many over the context": completion([*["x"] * 16, "x" * 600, *["y"] * 16]),
    "messages over the context": chat("x" * 600),
}


async def send(url: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client(url) as http:
        answer = await http.post(path, content=raw, headers={"content-type": "application/json", **headers})
    return answer.status_code, answer.json()["error"]


def without_side(error: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in error.items() if key != "side"}


async def test_bad_input_has_the_aggregated_workers_code_and_body() -> None:
    async with fleet(whole=True) as it:
        for name, (path, body) in BAD.items():
            pair, whole = await send(it.url, path, body), await send(it.whole.url, path, body)
            assert pair[0] == whole[0], (name, pair, whole)
            assert 400 <= pair[0] < 500, (name, pair)
            assert without_side(pair[1]) == without_side(whole[1]), name
            assert pair[1]["message"], name
        await it.at_rest()
        assert [one.engine.added for one in it.members] == [[], [], []]
        assert [(worker.failures, worker.avoid) for worker in it.router.pairing.workers] == [(0, ""), (0, "")]
        assert (await it.post(*completion())).status_code == 200


async def test_a_prompt_too_long_among_many_is_named_by_its_place() -> None:
    async with fleet() as it:
        status, error = await send(it.url, *BAD["one prompt of many over the context"])
        assert status == 400
        assert "prompt[16]" in error["message"]
        await it.at_rest()


async def test_fields_of_the_hand_off_from_a_client_are_stripped_and_counted() -> None:
    async with fleet(whole=True) as it:
        path, body = completion()
        named = {"bootstrap_room": 7, "bootstrap_host": "10.1.2.3", "bootstrap_port": 1, "kv_transfer_params": {}}
        pair = await it.post(path, {**body, **named})
        assert texts(pair) == texts(await it.whole.post(path, body))
        [attempt] = (await it.get(f"/requests/{pair.json()['id']}"))["attempts"]
        assert attempt["rooms"] != [7]
        async with client(it.url) as http:
            metrics = (await http.get("/metrics")).text
        counted = [line for line in metrics.splitlines() if "stripped" in line and "bootstrap_room" in line]
        assert [line.rsplit(" ", 1)[1] for line in counted] == ["1"], metrics


@pytest.mark.parametrize("at", ["router", "worker"])
async def test_a_body_over_the_limit_is_a_413(at: str) -> None:
    settings = {"router": {"max_body_bytes": 4096}, "worker": {}}[at]
    limited = {"router": {}, "worker": {"body_limit_bytes": 4096}}[at]
    async with fleet(router=settings, prefill=limited, decode=limited) as it:
        status, error = await send(it.url, *completion("x" * 8192))
        assert status == 413
        assert "4096" in error["message"]
        await it.at_rest()
        assert (await it.post(*completion())).status_code == 200


# --- a prompt over one side's limit -------------------------------------------------------------------------------

WIDE = spec(row_bytes=16 * 1024)  # 64 tokens a MiB
SIDES = {
    "decode": ({"pool_mb": 2, "model": WIDE}, {"pool_mb": 1, "model": WIDE}),
    "prefill": ({"pool_mb": 1, "model": WIDE}, {"pool_mb": 2, "model": WIDE}),
}


async def the_one_attempt(it: Fleet) -> None:
    assert it.router.metrics.attempts <= 1
    await it.at_rest()


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("side", SIDES)
async def test_over_one_sides_limit_is_a_400_naming_limit_length_and_side(side: str, ids: bool) -> None:
    prefill, decode = SIDES[side]
    async with fleet(prefill=prefill, decode=decode) as it:
        prompt = [104] * 65 if ids else "h" * 65
        status, error = await send(it.url, *completion(prompt))
        assert (status, error["side"]) == (400, side)
        assert "64" in error["message"]
        assert "65" in error["message"]
        assert it.prefill.engine.added == it.decode.engine.added == []
        await the_one_attempt(it)


@pytest.mark.parametrize("side", SIDES)
async def test_at_the_limit_the_text_is_right_as_far_as_the_pool_holds_it(side: str) -> None:
    prefill, decode = SIDES[side]
    async with fleet(whole=True, prefill=prefill, decode=decode) as it:
        for length in (62, 63, 64):
            answer = await it.post(*completion("h" * length, ignore_eos=True, max_tokens=300))
            whole = await it.whole.post(*completion("h" * length, ignore_eos=True, max_tokens=70))
            assert answer.status_code == 200, answer.text
            held = {"prefill": 128, "decode": 64}[side] - length + 1
            assert answer.json()["usage"]["completion_tokens"] == held
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert texts(whole)[0].startswith(texts(answer)[0].rstrip("�"))
        await it.at_rest()


async def test_the_models_context_is_the_limit_where_it_is_less() -> None:
    model = spec(context_len=32)
    async with fleet(model=model) as it:
        assert (await it.post(*completion("x" * 31))).json()["usage"]["completion_tokens"] == 1
        status, error = await send(it.url, *completion("x" * 32))
        assert (status, error["param"]) == (400, "prompt")
        assert "32" in error["message"]
        await it.at_rest()


@pytest.mark.parametrize("side", SIDES)
async def test_without_a_router_the_other_leg_of_a_refused_one_ends_with_its_cause(side: str) -> None:
    prefill, decode = SIDES[side]
    async with fleet(prefill=prefill, decode=decode) as it:
        path, body = completion("h" * 65)
        legs = [Talk(one.url, {**body, **pairing(it, 5)}, path) for one in (it.decode, it.prefill)]
        if side == "prefill":  # decode hears it from prefill, as 4xx with prefill's words
            answers = [await leg.answer() for leg in legs]
            assert [answer.status_code for answer in answers] == [400, 400]
            assert answers[0].json()["error"] == answers[1].json()["error"]
        else:
            assert (await legs[0].answer()).status_code == 400
            await legs[1].drop()
        await it.at_rest()


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_leg_that_prefills_edge_refuses_ends_decodes_whichever_came_first(first: str) -> None:
    async with fleet() as it:
        path, body = completion("hello")
        good, bad = {**body, **pairing(it, 6)}, {**body, "temperature": -1, **pairing(it, 6)}
        if first == "prefill":
            refused = await it.prefill.post(path, bad)
            waiting = Talk(it.decode.url, good, path)
        else:
            waiting = Talk(it.decode.url, good, path)
            await until_granted(it)
            refused = await it.prefill.post(path, bad)
        answer = await waiting.answer()
        assert (answer.status_code, answer.json()["error"]) == (400, refused.json()["error"])
        await it.at_rest()


async def until_granted(it: Fleet) -> None:
    await until(lambda: it.decode.pages(Page.GRANTED) > 0 and it.prefill.group.figures()["rooms"] == 1)


async def test_a_refused_batch_tells_decode_of_every_room() -> None:
    async with fleet() as it:
        path, body = completion(["a", "b", "c"])
        rooms = {**pairing(it, [11, 12, 13]), "rid": ["x.0.0", "x.1.0", "x.2.0"]}
        waiting = Talk(it.decode.url, {**body, **rooms}, path)
        refused = await it.prefill.post(path, {**body, **rooms, "n": 0})
        assert (await waiting.answer()).json()["error"] == refused.json()["error"]
        await it.at_rest()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_a_worker_of_a_pair_refuses_a_request_without_a_room(path: str) -> None:
    body = {CHAT: chat(), COMPLETIONS: completion(), GENERATE: generate()}[path][1]
    async with fleet() as it:
        for one in (it.prefill, it.decode):
            status, error = await send(one.url, path, body)
            assert (status, error["param"]) == (400, "bootstrap_room")
