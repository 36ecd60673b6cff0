"""Bad input: the same code and body on every role, before anything is allocated."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pdplane.worker.http import HttpSettings, build_app

from .http_fakes import FakeService, says

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
GENERATE = {"text": "hi"}
PAIR = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
CHAT_PATH, COMPLETION_PATH, GENERATE_PATH = "/v1/chat/completions", "/v1/completions", "/generate"


async def post(service: FakeService, path: str, body: Any, **headers: str) -> httpx.Response:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    transport = httpx.ASGITransport(build_app(service, HttpSettings(body_limit_bytes=100_000)))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.post(path, headers=named, **content)  # type: ignore[arg-type]


async def refused(service: FakeService, path: str, body: Any, **headers: str) -> dict[str, Any]:
    """The error of a 400; nothing was submitted."""
    response = await post(service, path, body, **headers)
    assert response.status_code == 400, response.text
    assert service.batch == []
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def messages(*turns: Any) -> dict[str, Any]:
    return {"messages": list(turns)}


CASES = [
    (CHAT_PATH, CHAT | {"model": 7}, "model", "invalid_type"),
    (CHAT_PATH, {}, "messages", "missing_required_parameter"),
    (CHAT_PATH, {"messages": []}, "messages", "invalid_value"),
    (CHAT_PATH, {"messages": "hi"}, "messages", "invalid_type"),
    (CHAT_PATH, messages({"role": "king", "content": "x"}), "messages[0].role", "invalid_type"),
    (CHAT_PATH, messages({"role": "user"}), "messages[0].content", "missing_required_parameter"),
    (CHAT_PATH, messages({"role": "tool", "content": "x"}), "messages", "template_error"),
    (
        CHAT_PATH,
        messages({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}),
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    (
        CHAT_PATH,
        messages({"role": "assistant", "tool_calls": [{"id": "1"}]}),
        "messages[0].tool_calls",
        "unsupported_parameter",
    ),
    (CHAT_PATH, CHAT | {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT_PATH, CHAT | {"max_tokens": -1}, "max_tokens", "invalid_value"),
    (CHAT_PATH, CHAT | {"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    (CHAT_PATH, CHAT | {"max_tokens": "7"}, "max_tokens", "invalid_type"),
    (CHAT_PATH, CHAT | {"max_tokens": True}, "max_tokens", "invalid_type"),
    (CHAT_PATH, CHAT | {"temperature": -1}, "temperature", "invalid_value"),
    (CHAT_PATH, CHAT | {"temperature": 2.1}, "temperature", "invalid_value"),
    (CHAT_PATH, CHAT | {"temperature": "hot"}, "temperature", "invalid_type"),
    (CHAT_PATH, CHAT | {"top_p": 0}, "top_p", "invalid_value"),
    (CHAT_PATH, CHAT | {"top_p": 1.5}, "top_p", "invalid_value"),
    (CHAT_PATH, CHAT | {"top_k": 0}, "top_k", "invalid_value"),
    (CHAT_PATH, CHAT | {"n": 0}, "n", "invalid_value"),
    (CHAT_PATH, CHAT | {"n": 129}, "n", "invalid_value"),
    (CHAT_PATH, CHAT | {"seed": 2**63}, "seed", "invalid_value"),
    (CHAT_PATH, CHAT | {"stop": ""}, "stop", "invalid_value"),
    (CHAT_PATH, CHAT | {"stop": ["x"] * 17}, "stop", "invalid_value"),
    (CHAT_PATH, CHAT | {"stop_token_ids": [257]}, "stop_token_ids", "invalid_value"),
    (CHAT_PATH, CHAT | {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    (CHAT_PATH, CHAT | {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (CHAT_PATH, CHAT | {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (CHAT_PATH, CHAT | {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    (CHAT_PATH, CHAT | {"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    (CHAT_PATH, CHAT | {"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
    (CHAT_PATH, CHAT | {"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
    (CHAT_PATH, CHAT | {"min_p": 0.1}, "min_p", "unsupported_parameter"),
    (CHAT_PATH, CHAT | {"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    (COMPLETION_PATH, {}, "prompt", "missing_required_parameter"),
    (COMPLETION_PATH, {"prompt": ""}, "prompt", "invalid_value"),
    (COMPLETION_PATH, {"prompt": []}, "prompt", "invalid_value"),
    (COMPLETION_PATH, {"prompt": [[]]}, "prompt[0]", "invalid_value"),
    (COMPLETION_PATH, {"prompt": ["a", ""]}, "prompt[1]", "invalid_value"),
    (COMPLETION_PATH, {"prompt": ["a", 1]}, "prompt", "invalid_value"),
    (COMPLETION_PATH, {"prompt": [1, 2.5]}, "prompt[1]", "invalid_type"),
    (COMPLETION_PATH, {"prompt": [1, 257]}, "prompt", "invalid_value"),
    (COMPLETION_PATH, {"prompt": [[1], [-1]]}, "prompt[1]", "invalid_value"),
    (COMPLETION_PATH, COMPLETION | {"logprobs": 6}, "logprobs", "invalid_value"),
    (COMPLETION_PATH, COMPLETION | {"best_of": 2}, "best_of", "unsupported_parameter"),
    (COMPLETION_PATH, COMPLETION | {"suffix": "x"}, "suffix", "unsupported_parameter"),
    (COMPLETION_PATH, COMPLETION | {"echo": True}, "echo", "unsupported_parameter"),
    (GENERATE_PATH, {}, "text", "missing_required_parameter"),
    (GENERATE_PATH, {"text": "a", "input_ids": [1]}, "text", "missing_required_parameter"),
    (GENERATE_PATH, {"text": ""}, "text", "invalid_value"),
    (GENERATE_PATH, {"input_ids": []}, "input_ids", "invalid_value"),
    (GENERATE_PATH, {"input_ids": [999]}, "input_ids", "invalid_value"),
    (
        GENERATE_PATH,
        GENERATE | {"sampling_params": {"max_new_tokens": 0}},
        "sampling_params.max_new_tokens",
        "invalid_value",
    ),
    (
        GENERATE_PATH,
        {"text": ["a", "b"], "sampling_params": [{}, {"temperature": "hot"}]},
        "sampling_params[1].temperature",
        "invalid_type",
    ),
    (GENERATE_PATH, {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "invalid_value"),
    (
        GENERATE_PATH,
        {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
        "sampling_params",
        "invalid_value",
    ),
    (GENERATE_PATH, GENERATE | {"sampling_params": {"regex": "a+"}}, "sampling_params.regex", "unsupported_parameter"),
    (GENERATE_PATH, GENERATE | {"image_data": ["x"]}, "image_data", "unsupported_parameter"),
    (GENERATE_PATH, GENERATE | {"rid": 7}, "rid", "invalid_value"),
    (GENERATE_PATH, GENERATE | {"rid": ["a", "b"]}, "rid", "invalid_value"),
    (GENERATE_PATH, {"text": ["x", "y"], "rid": ["a", "a"]}, "rid", "invalid_value"),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), CASES)
async def test_bad_input_is_named_alike_on_every_role(path: str, body: dict[str, Any], param: str, code: str) -> None:
    errors = [await refused(FakeService(role), path, body) for role in ("aggregated", "prefill", "decode")]
    assert (errors[0]["param"], errors[0]["code"]) == (param, code)
    assert param in errors[0]["message"]
    assert errors[0] == errors[1] == errors[2]


NO_OBJECTS = [b"", b"{", b"[1]", b"7", b'{"a": NaN}', b"\xff", b'{"a": "\xff"}', b'{"a": "\\ud800"}', b"[" * 9_000]


@pytest.mark.parametrize("body", NO_OBJECTS)
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH, GENERATE_PATH, "/abort_request"])
async def test_a_body_that_is_no_json_object_is_refused(path: str, body: bytes) -> None:
    assert (await refused(FakeService(), path, body))["code"] == "invalid_json"


async def test_a_number_too_large_for_any_field_is_refused() -> None:
    assert (await refused(FakeService(), COMPLETION_PATH, b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}"))["code"]


async def test_an_unknown_model_is_404() -> None:
    for path, body in ((CHAT_PATH, CHAT), (COMPLETION_PATH, COMPLETION)):
        response = await post(FakeService(), path, body | {"model": "other"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert "'other'" in response.json()["error"]["message"]
        assert "'tiny'" in response.json()["error"]["message"]


async def test_neutral_values_of_unserved_fields_and_unknown_fields_pass() -> None:
    service = FakeService()
    service.script = says("a")
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "best_of": 1,
        "audio": None,
        "unheard_of": {"x": 1},
    }
    assert (await post(service, CHAT_PATH, CHAT | neutral)).status_code == 200


async def test_a_body_over_the_limit_is_413() -> None:
    response = await post(FakeService(), COMPLETION_PATH, {"prompt": "x" * 100_000})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert "100000" in response.json()["error"]["message"]


async def test_a_client_that_waits_for_a_go_ahead_gets_413_before_it_sends() -> None:
    sent = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was asked for")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", b"200000"), (b"expect", b"100-continue")]
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers, "query_string": b""}
    await build_app(FakeService(), HttpSettings(body_limit_bytes=100_000))(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 413


async def test_a_client_that_leaves_while_it_sends_is_not_answered_and_starts_nothing() -> None:
    service = FakeService()
    sent = []
    messages = [{"type": "http.request", "body": b'{"text"', "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
    await build_app(service)(scope, receive, send)  # type: ignore[arg-type]
    assert (sent, service.batch) == ([], [])


async def test_a_prompt_over_the_context_names_length_limit_and_side() -> None:
    for role in ("aggregated", "prefill", "decode"):
        service = FakeService(role)
        error = await refused(service, COMPLETION_PATH, {"prompt": "x" * 512})
        assert error["code"] == "context_length_exceeded"
        assert "512 tokens" in error["message"]
        assert error["side"] == role


async def test_a_text_far_over_the_context_is_refused_without_being_tokenised_whole() -> None:
    service = FakeService()
    sizes = []
    encode = service.tokenizer.encode

    def counting(text: str, *, add_special: bool = True) -> list[int]:
        sizes.append(len(text))
        return encode(text)

    service.tokenizer.encode = counting  # type: ignore[method-assign]
    for path, body in (
        (COMPLETION_PATH, {"prompt": "x" * 50_000}),
        (CHAT_PATH, messages({"role": "user", "content": "x" * 50_000})),
    ):
        error = await refused(service, path, body)
        assert error["code"] == "context_length_exceeded"
        assert "over 8192 tokens" in error["message"]
    assert sizes == [8192, 8192]


async def test_more_samples_than_a_request_may_have_are_refused() -> None:
    error = await refused(FakeService(), COMPLETION_PATH, {"prompt": ["x"] * 9, "n": 128})
    assert (error["code"], error["param"]) == ("too_many_samples", "n")
    assert "1152 samples" in error["message"]


async def test_a_prompt_over_the_workers_pool_names_length_limit_and_side() -> None:
    error = await refused(FakeService("decode"), COMPLETION_PATH, {"prompt": "x" * 300} | PAIR)
    assert error["code"] == "prompt_too_long"
    assert "300 tokens" in error["message"]
    assert "decode worker can hold 256" in error["message"]


async def test_one_long_prompt_in_a_list_is_named_by_its_index() -> None:
    prompts = ["x"] * 20 + ["x" * 300] + ["x"] * 12
    error = await refused(FakeService(), COMPLETION_PATH, {"prompt": prompts})
    assert error["param"] == "prompt[20]"


async def test_max_tokens_is_clipped_to_what_the_context_leaves() -> None:
    service = FakeService()
    service.script = says("a")
    await post(service, COMPLETION_PATH, {"prompt": "x" * 200, "max_tokens": 10_000})
    assert service.batch[0].sampling.max_tokens == 312
    await post(service, CHAT_PATH, CHAT)
    assert service.batch[0].sampling.max_tokens == 512 - len(service.batch[0].prompt)
    await post(service, COMPLETION_PATH, COMPLETION)
    assert service.batch[0].sampling.max_tokens == 16


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
async def test_a_bad_timeout_header_is_refused(value: str) -> None:
    error = await refused(FakeService(), COMPLETION_PATH, COMPLETION, x_request_timeout=value)
    assert error["param"] == "x-request-timeout"


async def test_an_unknown_path_and_a_wrong_method_have_json_bodies() -> None:
    transport = httpx.ASGITransport(build_app(FakeService()))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        missing = await client.get("/v2/nothing")
        wrong = await client.get("/generate")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
