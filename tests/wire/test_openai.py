"""OpenAI's requests read into what the sampler is asked, and errors as its clients read them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdplane.core.errors import Cause, Refused, bad_request, busy
from pdplane.wire.body import decode_object
from pdplane.wire.errors import error_body, error_event, error_headers
from pdplane.wire.openai import (
    ChatChunk,
    ChatChunkChoice,
    Delta,
    read_chat,
    read_completion,
    usage,
)
from pdplane.wire.sampling import Ask


def chat(**more: Any) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"}], **more}


def test_a_bare_chat_asks_for_the_rest_of_the_context_at_temperature_one() -> None:
    assert read_chat(chat()).ask() == Ask(max_tokens=None, temperature=1.0, top_p=1.0, top_k=0)


def test_a_bare_completion_asks_for_sixteen_tokens() -> None:
    assert read_completion({"prompt": "x"}).ask().max_tokens == 16


def test_every_sampling_field_arrives() -> None:
    asked = read_chat(
        chat(
            max_tokens=9,
            max_completion_tokens=7,
            min_tokens=2,
            n=3,
            temperature=0,
            top_p=0.5,
            top_k=40,
            seed=-1,
            stop="end",
            stop_token_ids=[4],
            ignore_eos=True,
            logprobs=True,
            top_logprobs=3,
            skip_special_tokens=False,
            include_stop_str_in_output=True,
        )
    ).ask()
    assert asked == Ask(
        n=3,
        max_tokens=7,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        seed=2**63 - 1,
        stop=("end",),
        stop_token_ids=(4,),
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
        skip_special_tokens=False,
        include_stop_str=True,
    )


def test_null_is_no_value() -> None:
    names = ["max_tokens", "n", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "tools"]
    assert read_chat(chat(**dict.fromkeys(names))).ask() == Ask()


def test_minus_one_switches_top_k_off() -> None:
    assert read_chat(chat(top_k=-1)).ask().top_k == 0


def test_zero_logprobs_of_a_completion_still_asks_for_the_sampled_tokens() -> None:
    asked = read_completion({"prompt": "x", "logprobs": 0}).ask()
    assert (asked.logprobs, asked.top_logprobs) == (True, 0)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_come_in_four_forms(prompt: object, expected: object) -> None:
    assert read_completion({"prompt": prompt}).prompts() == expected


def test_text_parts_are_joined_and_developers_are_systems() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = read_chat(
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "name": "ann", "content": parts},
                {"role": "assistant", "content": None},
            ]
        }
    ).turns()
    assert turns == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
    ]


def test_of_several_unserved_fields_the_same_one_is_always_named() -> None:
    with pytest.raises(Refused) as refused:
        read_chat(chat(tools=[{}], logit_bias={"1": 1}))
    assert refused.value.cause.param == "logit_bias"


def test_an_error_names_types_and_the_way_to_the_field() -> None:
    with pytest.raises(Refused) as refused:
        read_chat({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 7}]})
    cause = refused.value.cause
    assert cause.param == "messages[1].content"
    assert "got `int`" in cause.message


def test_a_deep_body_is_refused_and_nothing_breaks() -> None:
    with pytest.raises(Refused) as refused:
        decode_object(b'{"a":' * 100_000)
    assert refused.value.cause.status == 400


def test_error_bodies_have_openais_keys_and_ours() -> None:
    body = msgspec.json.decode(error_body(bad_request("n must be 1", code="invalid_value", param="n")))
    assert body == {
        "error": {
            "message": "n must be 1",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
            "retryable": False,
        }
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (401, "authentication_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_the_error_type_follows_the_status(status: int, kind: str) -> None:
    assert msgspec.json.decode(error_body(Cause("x", "y", status)))["error"]["type"] == kind


def test_a_busy_side_is_named_with_its_wait() -> None:
    cause = busy("full", side="decode", retry_after_s=2)
    assert error_headers(cause) == {"retry-after": "2"}
    assert b'"side":"decode"' in error_event(cause)


def test_golden_bytes_of_a_streams_events() -> None:
    choice = ChatChunkChoice(index=0, delta=Delta(content="hi"))
    head = b'{"id":"r","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    plain = ChatChunk(id="r", created=1, model="m", choices=[choice])
    assert msgspec.json.encode(plain) == head + (
        b'[{"index":0,"delta":{"content":"hi"},"logprobs":null,"finish_reason":null}]}'
    )
    last = ChatChunk(id="r", created=1, model="m", choices=[], usage=usage(2, 3, 1))
    assert msgspec.json.encode(last) == head + (
        b'[],"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5,'
        b'"prompt_tokens_details":{"cached_tokens":1}}}'
    )
