"""One generation over HTTP, in any of the three dialects, streaming or not, and what a client saw of it."""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec

TIMEOUT_S = 300.0
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}


class Outcome(msgspec.Struct, kw_only=True):
    """What must not depend on who served."""

    status: int = 200
    text: str = ""
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    token_ids: list[int] = []  # where the answer shows them
    error: str = ""


class Answer(msgspec.Struct, kw_only=True):
    """`first_content_s`: from before the request was sent to the first event with text; None without one.
    `cached_tokens`: of the prompt, from a prefix cache; it depends on who served, -1 where the answer does not say."""

    outcome: Outcome
    request_id: str = ""
    cached_tokens: int = -1
    first_content_s: float | None = None
    total_s: float = 0.0


def client(connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=2.0)
    return httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, limits=limits)


async def ask(http: httpx.AsyncClient, url: str, endpoint: str, body: dict[str, Any]) -> Answer:
    """`endpoint`: a key of PATHS. An error answer is an outcome too."""
    answer = Answer(outcome=Outcome())
    started = time.perf_counter()
    async with http.stream("POST", url + PATHS[endpoint], json=body) as response:
        answer.request_id = response.headers.get("x-request-id", "")
        if response.status_code != 200:
            answer.outcome = Outcome(status=response.status_code, error=(await response.aread()).decode())
        elif body.get("stream"):
            await _read_events(response, endpoint, answer, started)
        else:
            _take(endpoint, answer, msgspec.json.decode(await response.aread()))
    answer.total_s = time.perf_counter() - started
    return answer


async def _read_events(response: httpx.Response, endpoint: str, answer: Answer, started: float) -> None:
    ended = False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            ended = True
            continue
        _take(endpoint, answer, msgspec.json.decode(line[6:]))
        if answer.first_content_s is None and answer.outcome.text:
            answer.first_content_s = time.perf_counter() - started
    if not ended:
        answer.outcome.error = answer.outcome.error or "the stream ended without [DONE]"


def _take(endpoint: str, answer: Answer, payload: dict[str, Any]) -> None:
    """An event adds to the outcome; a body is all of it."""
    if "error" in payload:
        answer.outcome.error = str(payload["error"])
    elif endpoint == "generate":
        _take_generated(answer, payload)
    else:
        _take_choices(answer, payload)


def _take_generated(answer: Answer, payload: dict[str, Any]) -> None:
    """/generate says the whole so far each time."""
    meta, outcome = payload["meta_info"], answer.outcome
    outcome.text, outcome.token_ids = payload["text"], payload["output_ids"]
    outcome.prompt_tokens, outcome.completion_tokens = meta["prompt_tokens"], meta["completion_tokens"]
    answer.cached_tokens = meta["cached_tokens"]
    if meta["finish_reason"]:
        outcome.finish_reason = meta["finish_reason"]["type"]
        outcome.matched_stop = meta["finish_reason"].get("matched")


def _take_choices(answer: Answer, payload: dict[str, Any]) -> None:
    outcome = answer.outcome
    for choice in payload["choices"]:
        said = choice.get("message") or choice.get("delta") or choice
        outcome.text += said.get("text", said.get("content")) or ""
        outcome.token_ids = outcome.token_ids + (choice.get("token_ids") or [])
        if choice["finish_reason"] is not None:
            outcome.finish_reason = choice["finish_reason"]
            outcome.matched_stop = choice.get("matched_stop")
    if usage := payload.get("usage"):
        outcome.prompt_tokens, outcome.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
