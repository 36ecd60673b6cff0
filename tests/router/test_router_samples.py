"""Several samples before workers that take one each: a pair of legs per sample, and one answer."""

from __future__ import annotations

import json
from typing import Any

from .params_fakes import holding, nothing_held, params_fleet, prefill_of, vllm_fleet
from .router_fakes import CHAT, Asked, Fleet, record_of, until

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def completion(
    asked: Asked, text: str, prompt_tokens: int = 3, completion_tokens: int = 2, **more: Any
) -> dict[str, Any]:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    return {
        "id": asked.headers["x-request-id"],
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": "stop"}],
        "usage": usage,
        **more,
    }


def echo(asked: Asked) -> None:
    """Answers with its prompt and seed."""
    body = asked.body
    asked.reply(200, completion(asked, f"{body.get('prompt')}/{body.get('seed')}"))


def streamed(asked: Asked, *texts: str, usage: bool = True) -> None:
    asked.start()
    for text in texts:
        whole = completion(asked, text)
        del whole["usage"]
        asked.chunk(b"data: " + json.dumps(whole).encode() + b"\n\n")
    if usage:
        last = completion(asked, "") | {"choices": []}
        asked.chunk(b"data: " + json.dumps(last).encode() + b"\n\n")
    asked.chunk(b"data: [DONE]\n\n")
    asked.finish()


def events(body: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


async def waiting(it: Fleet, count: int) -> list[Asked]:
    """The legs at decode, in the order of their samples."""
    await until(lambda: len(it.decode.seen) == count)
    return sorted(it.decode.seen, key=lambda leg: int(leg.headers["x-request-id"].split(".")[1]))


async def test_every_sample_has_a_pair_of_legs_with_one_prompt_and_no_n() -> None:
    async with params_fleet(decode=echo) as it:
        answer = await it.post({"model": "m", "prompt": ["a", "b"], "n": 2, "seed": 7}, COMPLETIONS)
        assert answer.status == 200
        sent = [(leg.body["prompt"], leg.body["seed"]) for leg in it.prefill.seen]
        assert sent == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]
        assert all("n" not in leg.body for leg in it.prefill.seen + it.decode.seen)
        rids = [leg.headers["x-request-id"] for leg in it.prefill.seen]
        request = answer.headers["x-request-id"]
        assert rids == [f"{request}.{sample}.0" for sample in range(4)]
        await it.idle()


async def test_choices_are_in_prompt_major_order_whoever_answers_first() -> None:
    async with params_fleet(decode=lambda asked: None) as it, it.client() as client:
        client.post(json.dumps({"prompt": ["a", "b"], "n": 2}).encode(), COMPLETIONS)
        for leg in reversed(await waiting(it, 4)):
            echo(leg)
        merged = (await client.read()).json
        assert [(choice["index"], choice["text"][0]) for choice in merged["choices"]] == [
            (0, "a"), (1, "a"), (2, "b"), (3, "b"),
        ]  # fmt: skip
        assert merged["id"].startswith("pd-")
        assert (merged["object"], merged["created"], merged["model"]) == ("text_completion", 5, "m")


async def test_usage_counts_a_prompt_once_and_every_choice() -> None:
    async with params_fleet(decode=echo) as it:
        merged = (await it.post({"prompt": ["a", "b"], "n": 3}, COMPLETIONS)).json
        assert merged["usage"] == {
            "prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18,
            "prompt_tokens_details": {"cached_tokens": 2},
        }  # fmt: skip


async def test_what_a_choice_holds_beside_its_text_stays_as_it_came() -> None:
    told = {"tokens": ["a"], "token_logprobs": [-0.1250], "top_logprobs": [{"a": -1e-05}], "text_offset": [0]}

    def answered(asked: Asked) -> None:
        whole = completion(asked, "a") | {"choices": [{"index": 0, "logprobs": told, "stop_reason": 7}]}
        if asked.body.get("stream"):
            asked.start()
            asked.chunk(b"data: " + json.dumps(whole | {"usage": None}).encode() + b"\n\n")
            asked.chunk(b"data: [DONE]\n\n")
            asked.finish()
        else:
            asked.reply(200, whole)

    async with params_fleet(decode=answered) as it:
        asked = {"prompt": "a", "n": 2, "logprobs": 1}
        whole = (await it.post(asked, COMPLETIONS)).json["choices"]
        streamed = [
            event["choices"][0]
            for event in events((await it.post(asked | {"stream": True}, COMPLETIONS)).body)
            if event != "[DONE]"
        ]
        assert whole == [{"index": k, "logprobs": told, "stop_reason": 7} for k in range(2)]
        assert sorted(streamed, key=lambda choice: choice["index"]) == whole
        assert all(leg.body["logprobs"] == 1 for leg in it.prefill.seen + it.decode.seen)


async def test_one_sample_without_a_handoff_marks_the_whole() -> None:
    def second_one_holds_nothing(asked: Asked) -> None:
        (nothing_held(None) if ".1." in asked.headers["x-request-id"] else holding())(asked)

    async with params_fleet(prefill=second_one_holds_nothing, decode=echo, mode="fallback") as it:
        answer = await it.post({"prompt": "a", "n": 3}, COMPLETIONS)
        assert (answer.status, answer.headers["x-pd-mode"]) == (200, "decode-only")
        told = await record_of(it, answer)
        modes = {attempt["sample"]: attempt["mode"] for attempt in told["attempts"]}
        assert modes == {0: "pd", 1: "decode-only", 2: "pd"}
        assert it.router.metrics.decode_only == 1


async def test_prompts_of_ids_go_one_by_one() -> None:
    async with params_fleet(decode=echo) as it:
        await it.post({"prompt": [[1, 2], [3]]}, COMPLETIONS)
        assert [leg.body["prompt"] for leg in it.prefill.seen] == [[1, 2], [3]]
        assert "seed" not in it.prefill.seen[0].body


async def test_a_list_of_one_prompt_is_one_sample_and_goes_as_it_is() -> None:
    async with params_fleet(decode=echo) as it:
        answer = await it.post({"prompt": ["a"]}, COMPLETIONS)
        assert it.decode.seen[0].body["prompt"] == ["a"]
        assert answer.json["id"] == it.decode.seen[0].headers["x-request-id"]


async def test_streams_are_merged_under_one_head_one_id_and_one_end() -> None:
    async with params_fleet(decode=lambda asked: None) as it, it.client() as client:
        asked = {"prompt": "a", "n": 2, "stream": True, "stream_options": {"include_usage": True}}
        client.post(json.dumps(asked).encode(), COMPLETIONS)
        one, other = await waiting(it, 2)
        streamed(other, "x", "y")
        streamed(one, "z")
        answer = await client.read()
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-pd-mode"] == "pd"
        *chunks, usage, done = events(answer.body)
        assert done == "[DONE]"
        assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks if c["choices"][0]["index"]] == [
            (1, "x"), (1, "y"),
        ]  # fmt: skip
        assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
        assert usage["choices"] == []
        assert usage["usage"]["prompt_tokens"] == 3
        assert usage["usage"]["completion_tokens"] == 4
        await it.idle()


async def test_without_usage_asked_for_none_is_told() -> None:
    async with params_fleet(decode=lambda asked: streamed(asked, "x", usage=False)) as it:
        answer = await it.post({"prompt": "a", "n": 2, "stream": True}, COMPLETIONS)
        assert [event["choices"][0]["index"] for event in events(answer.body)[:-1]] in ([0, 1], [1, 0])
        assert events(answer.body)[-1] == "[DONE]"


async def test_an_old_client_gets_the_merged_stream_without_chunks() -> None:
    async with params_fleet(decode=lambda asked: streamed(asked, "x")) as it, it.client() as client:
        client.post(json.dumps({"prompt": "a", "n": 2, "stream": True}).encode(), COMPLETIONS, version="1.0")
        answer = await client.read()
        assert "transfer-encoding" not in answer.headers
        assert events(answer.body)[-1] == "[DONE]"


async def test_the_first_failure_before_any_byte_is_the_answer_and_ends_all_others() -> None:
    async with params_fleet(decode=lambda asked: None) as it, it.client() as client:
        client.post(json.dumps(PROMPT | {"n": 3}).encode())
        legs = await waiting(it, 3)
        legs[1].fail(400, code="bad_stop", param="stop")
        answer = await client.read()
        assert (answer.status, answer.error["code"]) == (400, "bad_stop")
        for leg in (legs[0], legs[2]):
            await leg.left.wait()
        released = {(await prefill_of(it).released())[0] for _ in range(3)}
        assert released == {leg.headers["x-request-id"] for leg in it.prefill.seen}
        await it.idle()
        assert prefill_of(it).releases.empty()


async def test_a_failure_after_the_first_byte_is_an_error_event_and_ends_all_others() -> None:
    async with params_fleet(decode=lambda asked: None, retries=0) as it, it.client() as client:
        client.post(json.dumps(PROMPT | {"n": 2, "stream": True}).encode())
        one, other = await waiting(it, 2)
        one.start()
        one.chunk(b"data: " + json.dumps(completion(one, "x")).encode() + b"\n\n")
        assert (await client.head())[0] == 200
        await client.chunk()
        other.fail(500, code="boom")
        rest = await client.chunks()
        assert events(rest.strip())[-1]["error"]["code"] == "boom"
        await one.left.wait()
        await it.idle()


async def test_a_sample_that_has_sent_nothing_is_tried_again_while_another_streams() -> None:
    async with params_fleet(1, 2, decode=lambda asked: None) as it, it.client() as client:
        client.post(json.dumps({"prompt": "a", "n": 2, "stream": True}).encode(), COMPLETIONS)
        await until(lambda: sum(len(fake.seen) for fake in it.decodes) == 2)
        one, other = (fake.seen[0] for fake in it.decodes)
        streamed(one, "x")
        await client.head()
        other.fail(503, code="overloaded", retryable=True)
        await until(lambda: sum(len(fake.seen) for fake in it.decodes) == 3)
        again = it.decodes[0].seen[-1]
        assert again is not one
        streamed(again, "y")
        texts = [event["choices"][0]["text"] for event in events(await client.chunks())[:-1] if event["choices"]]
        assert sorted(texts) == ["x", "y"]
        await it.idle()


async def test_a_client_that_leaves_ends_every_pair() -> None:
    async with params_fleet(decode=lambda asked: None) as it, it.client() as client:
        client.post(json.dumps(PROMPT | {"n": 3}).encode())
        legs = await waiting(it, 3)
        client.leave()
        for leg in legs:
            await leg.left.wait()
        for _ in range(3):
            await prefill_of(it).released()
        await it.idle()
        assert not it.router.active


async def test_an_abort_by_label_ends_every_pair() -> None:
    async with params_fleet(decode=lambda asked: None) as it, it.client() as client:
        client.post(json.dumps(PROMPT | {"n": 2}).encode(), headers="x-request-id: mine\r\n")
        await waiting(it, 2)
        assert (await it.post({"rid": "mine"}, "/abort_request")).json == {"aborted": 1}
        assert (await client.read()).status == 499
        await it.idle()


async def test_the_deadline_ends_every_pair() -> None:
    async with params_fleet(decode=lambda asked: None) as it:
        answer = await it.post(PROMPT | {"n": 2}, headers="x-request-timeout: 0.2\r\n")
        assert (answer.status, answer.error["code"]) == (504, "deadline")
        await it.idle()


async def test_the_record_has_an_attempt_per_sample_with_its_hold() -> None:
    async with params_fleet(decode=echo) as it:
        answer = await it.post({"prompt": ["a", "b"]}, COMPLETIONS)
        told = (await it.get("/requests/" + answer.headers["x-request-id"])).json
        assert (told["samples"], told["verdict"], told["status"]) == (2, "ok", 200)
        assert [attempt["sample"] for attempt in told["attempts"]] == [0, 1]
        assert all(attempt["handoff"]["hold"] for attempt in told["attempts"])


async def test_a_sample_that_cannot_be_read_fails_the_whole() -> None:
    async with params_fleet(decode=lambda asked: asked.reply(200, b"nonsense")) as it:
        answer = await it.post(PROMPT | {"n": 2})
        assert (answer.status, answer.error["code"]) == (502, "sample_failed")
        await it.idle()


async def test_an_error_inside_a_samples_stream_breaks_off_the_whole() -> None:
    def break_off(asked: Asked) -> None:
        asked.start()
        asked.chunk(b"data: " + json.dumps(completion(asked, "x")).encode() + b"\n\n")
        asked.chunk(b'data: {"error":{"message":"lost it","code":500}}\n\ndata: [DONE]\n\n')
        asked.finish()

    async with params_fleet(decode=break_off) as it:
        answer = await it.post(PROMPT | {"n": 2, "stream": True})
        assert "lost it" in events(answer.body)[-1]["error"]["message"]
        await it.idle()


async def test_too_many_samples_are_refused_before_any_leg() -> None:
    async with params_fleet(decode=echo, max_samples=3) as it:
        answer = await it.post({"prompt": ["a", "b"], "n": 2}, COMPLETIONS)
        assert (answer.status, answer.error["code"]) == (400, "too_many_samples")
        assert not it.prefill.seen


async def test_vllm_gets_a_pair_per_sample_too() -> None:
    def prefill(asked: Asked) -> None:
        holding(prompt_token_ids=None)(asked)

    async with vllm_fleet(prefill=prefill, decode=echo) as it:
        merged = (await it.post({"prompt": ["a", "b"], "n": 2}, COMPLETIONS)).json
        assert len(merged["choices"]) == 4
        assert len({leg.body["kv_transfer_params"]["remote_request_id"] for leg in it.decode.seen}) == 4


async def test_two_clients_of_one_connection_are_answered_in_turn() -> None:
    async with params_fleet(decode=echo) as it, it.client() as client:
        for _ in range(2):
            client.post(json.dumps({"prompt": "a", "n": 2}).encode(), COMPLETIONS)
        assert [len((await client.read()).json["choices"]) for _ in range(2)] == [2, 2]
        assert (await it.post(PROMPT, CHAT)).status == 200
