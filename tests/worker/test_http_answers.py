"""Answers of the three endpoints, whole and as streams, over a scripted service."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from pdplane.core.errors import Cause, aborted, busy, client_left
from pdplane.core.frames import TopLogprob
from pdplane.worker.http import build_app
from pdplane.worker.service import Generation, Stream

from .http_fakes import FakeService, chunk, fails, says, tokens

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
GENERATE = {"text": "hi"}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": GENERATE}
PATHS = list(BODIES)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


async def post(service: FakeService, path: str, body: Any, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        return await client.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


async def events(service: FakeService, path: str, body: dict[str, Any]) -> list[Any]:
    """The payloads of a stream; its closing [DONE] stays a string."""
    response = await post(service, path, body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return payloads(response.text)


def payloads(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else msgspec.json.decode(line) for line in lines]


async def test_a_chat_is_answered_as_openai_does(service: FakeService) -> None:
    service.script = says("Hel", "lo", finish="stop", matched_stop="!")
    answer = (await post(service, "/v1/chat/completions", CHAT)).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": "!",
    }
    prompt = len(service.batch[0].prompt)
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "total_tokens": prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat_streams_role_then_text_then_finish_reason(service: FakeService) -> None:
    service.script = says("Hel", "", "lo")
    seen = await events(service, "/v1/chat/completions", CHAT)
    assert [(e["choices"][0]["delta"], e["choices"][0]["finish_reason"]) for e in seen[:-1]] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hel"}, None),
        ({"content": "lo"}, None),
        ({}, "length"),
    ]
    assert seen[-1] == "[DONE]"
    assert {e["object"] for e in seen[:-1]} == {"chat.completion.chunk"}
    assert len({e["id"] for e in seen[:-1]}) == 1
    assert not any("usage" in e for e in seen[:-1])


@pytest.mark.parametrize("path", PATHS[:2])
async def test_usage_comes_once_in_the_last_event_and_equals_the_whole_answers(service: FakeService, path: str) -> None:
    service.script = says("a", "b", cached_tokens=1)
    whole = (await post(service, path, BODIES[path])).json()["usage"]
    seen = await events(service, path, BODIES[path] | {"stream_options": {"include_usage": True}})
    assert [e["usage"] for e in seen[:-1]] == [None] * (len(seen) - 2) + [whole]
    assert seen[-2]["choices"] == []
    assert whole["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_a_completion_is_answered_as_openai_does(service: FakeService) -> None:
    service.script = says("one", " two")
    answer = (await post(service, "/v1/completions", COMPLETION)).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "one two", "logprobs": None, "finish_reason": "length", "matched_stop": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 2


async def test_a_completion_streams_text_and_skips_what_says_nothing(service: FakeService) -> None:
    service.script = says("one", "", "two")
    seen = await events(service, "/v1/completions", COMPLETION)
    assert [(e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in seen[:-1]] == [
        ("one", None),
        ("two", "length"),
    ]


async def test_prompts_and_samples_come_back_in_order_and_a_prompt_counts_once(service: FakeService) -> None:
    def echo(generation: Generation, stream: Stream) -> None:
        says(f"{generation.index}:{len(generation.prompt)}")(generation, stream)

    service.script = echo
    answer = (await post(service, "/v1/completions", {"prompt": ["a", "bb", "ccc"], "n": 2})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["0:1", "1:1", "2:2", "3:2", "4:3", "5:3"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 18


async def test_samples_of_a_stream_are_told_apart_by_index(service: FakeService) -> None:
    service.script = lambda generation, stream: says(f"s{generation.index}")(generation, stream)
    seen = await events(service, "/v1/chat/completions", CHAT | {"n": 3})
    texts = {0: "", 1: "", 2: ""}
    for event in seen[:-1]:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "s0", 1: "s1", 2: "s2"}
    assert sum(e["choices"][0]["finish_reason"] == "length" for e in seen[:-1]) == 3


async def test_generate_answers_one_prompt_with_an_object(service: FakeService) -> None:
    service.script = says("abc", finish="stop", matched_stop=7, cached_tokens=1)
    answer = (await post(service, "/generate", GENERATE | {"rid": "mine"})).json()
    assert answer == {
        "text": "abc",
        "output_ids": [97, 98, 99],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "stop", "matched": 7},
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "cached_tokens": 1,
        },
    }


async def test_generate_answers_a_batch_with_a_list(service: FakeService) -> None:
    service.script = says("a")
    answer = (await post(service, "/generate", {"input_ids": [[1], [2, 3]]})).json()
    assert [item["meta_info"]["prompt_tokens"] for item in answer] == [1, 2]
    assert answer[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}


async def test_a_batch_of_one_is_still_a_list(service: FakeService) -> None:
    service.script = says("a")
    assert isinstance((await post(service, "/generate", {"text": ["hi"]})).json(), list)


async def test_generate_streams_the_whole_so_far(service: FakeService) -> None:
    service.script = says("a", "b")
    seen = await events(service, "/generate", GENERATE)
    assert [e["text"] for e in seen[:-1]] == ["a", "ab"]
    assert [e["output_ids"] for e in seen[:-1]] == [[97], [97, 98]]
    assert [e["meta_info"]["finish_reason"] for e in seen[:-1]] == [None, {"type": "length", "length": 2}]
    assert seen[-1] == "[DONE]"
    assert "index" not in seen[0]


async def test_generate_numbers_the_items_of_a_batchs_stream(service: FakeService) -> None:
    service.script = says("a")
    seen = await events(service, "/generate", {"text": ["x", "y"]})
    assert {e["index"] for e in seen[:-1]} == {0, 1}


def with_logprobs(text: str, top: tuple[TopLogprob, ...]) -> Any:
    def play(generation: Generation, stream: Stream) -> None:
        given = tokens(text, -0.5, top)
        stream.push(chunk(generation, text, tokens=given, finish_reason="length"))

    return play


async def test_chat_logprobs_carry_text_bytes_and_alternatives(service: FakeService) -> None:
    service.script = with_logprobs("a", (TopLogprob(98, -1.5),))
    answer = (await post(service, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1})).json()
    assert answer["choices"][0]["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -1.5, "bytes": [98]}],
        }
    ]
    assert (service.batch[0].sampling.logprobs, service.batch[0].sampling.top_logprobs) == (True, 1)


async def test_completion_logprobs_count_characters_and_tell_partial_ones_apart(service: FakeService) -> None:
    service.script = with_logprobs("é!", (TopLogprob(98, -1.5),))
    answer = (await post(service, "/v1/completions", COMPLETION | {"logprobs": 1})).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][2] == {"b": -1.5, "!": -0.5}


async def test_offsets_go_on_from_event_to_event(service: FakeService) -> None:
    def play(generation: Generation, stream: Stream) -> None:
        stream.push(chunk(generation, "ab", tokens=tokens("ab", -1.0)))
        stream.push(chunk(generation, "c", 2, tokens=tokens("c", -1.0), finish_reason="length"))

    service.script = play
    seen = await events(service, "/v1/completions", COMPLETION | {"logprobs": 0})
    assert [e["choices"][0]["logprobs"]["text_offset"] for e in seen[:-1]] == [[0, 1], [2]]


async def test_generate_logprobs_are_triples(service: FakeService) -> None:
    service.script = with_logprobs("a", (TopLogprob(98, -1.5),))
    asked = {"return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = (await post(service, "/generate", GENERATE | asked)).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 97, "a"]]
    assert meta["output_top_logprobs"] == [[[-1.5, 98, "b"]]]
    assert meta["input_token_logprobs"] == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_first_chunk_has_its_own_status(
    service: FakeService, path: str, stream: bool
) -> None:
    service.script = fails(Cause("peer_gone", "the prefill is gone", 503, retryable=True, side="decode"))
    response = await post(service, path, BODIES[path] | {"stream": stream})
    assert response.status_code == 503
    assert response.json()["error"] == {
        "message": "the prefill is gone",
        "type": "server_error",
        "param": None,
        "code": "peer_gone",
        "retryable": True,
        "side": "decode",
    }


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_in_mid_stream_is_the_last_event(service: FakeService, path: str) -> None:
    service.script = fails(Cause("peer_gone", "the prefill is gone", 503), after="some")
    seen = await events(service, path, BODIES[path])
    assert seen[-1]["error"]["code"] == "peer_gone"
    assert len(seen) > 1


async def test_one_failed_sample_ends_the_others_with_its_cause(service: FakeService) -> None:
    cause = Cause("no_progress", "stuck", 500)

    def second_fails(generation: Generation, stream: Stream) -> None:
        if generation.index == 1:
            stream.fail(cause)

    service.script = second_fails
    response = await post(service, "/v1/completions", COMPLETION | {"n": 3})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "no_progress")
    assert sorted(service.closed) == [(service.batch[0].rid, cause), (service.batch[2].rid, cause)]


async def test_an_aborted_sample_is_a_choice_that_says_so(service: FakeService) -> None:
    def second_aborted(generation: Generation, stream: Stream) -> None:
        play = fails(aborted("decode"), after="half") if generation.index == 1 else says("whole")
        play(generation, stream)

    service.script = second_aborted
    answer = (await post(service, "/v1/completions", COMPLETION | {"n": 3})).json()
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        ("whole", "length"),
        ("half", "abort"),
        ("whole", "length"),
    ]


async def test_a_busy_worker_says_when_to_come_back(service: FakeService) -> None:
    service.refusal = busy("full", side="decode", retry_after_s=3)
    response = await post(service, "/v1/chat/completions", CHAT)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_the_clients_request_id_names_the_request_and_comes_back(service: FakeService) -> None:
    service.script = says("a")
    response = await post(service, "/v1/chat/completions", CHAT, x_request_id="label-1")
    assert service.batch[0].request_id == "label-1"
    assert response.headers["x-request-id"] == response.json()["id"] == "label-1"


async def test_an_id_from_a_body_cannot_write_headers(service: FakeService) -> None:
    service.script = says("a")
    response = await post(service, "/generate", GENERATE | {"rid": "a\r\nset-cookie: b"})
    assert response.status_code == 200
    assert "x-request-id" not in response.headers
    assert "set-cookie" not in response.headers


async def test_a_deadline_can_be_shortened_and_not_lengthened(service: FakeService) -> None:
    service.script = says("a")
    await post(service, "/generate", GENERATE, x_request_timeout="2.5")
    assert 0 < service.batch[0].deadline_s <= 2.5
    await post(service, "/generate", GENERATE, x_request_timeout="1e6")
    assert 299 < service.batch[0].deadline_s <= 300


async def test_a_long_prompt_is_tokenised_off_the_loop_to_the_same_end(service: FakeService) -> None:
    service.context_len = service.max_prompt_tokens = 10_000
    service.script = says("a")
    answer = (await post(service, "/v1/completions", {"prompt": "x" * 5_000})).json()
    assert answer["usage"]["prompt_tokens"] == 5_000


async def test_the_closing_of_the_other_leg_is_told_as_a_failure_of_the_pair(service: FakeService) -> None:
    service.script = fails(client_left("prefill"))
    response = await post(service, "/v1/completions", COMPLETION)
    assert (response.status_code, response.json()["error"]["side"]) == (503, "prefill")
