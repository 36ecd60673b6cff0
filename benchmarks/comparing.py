"""Asks one set of requests and says what differs from the answers that were expected."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from asking import Answer, Outcome, ask, client

PAGE = 16  # tokens: every worker of the run has this page size
PROGRESS_S = 15.0


class Request(msgspec.Struct, kw_only=True):
    """`name` says which one it is where it is reported; `endpoint`: a key of asking.PATHS."""

    name: str
    endpoint: str
    body: dict[str, Any]
    prompt_tokens: int
    new_tokens: int


def as_completion(request: Request) -> Request:
    """The same asked of /v1/completions, where /generate is not served; token ids are told there too."""
    if request.endpoint != "generate":
        return request
    asked = request.body
    sampling = dict(asked["sampling_params"])
    body = {
        "prompt": asked["text"] if "text" in asked else asked["input_ids"],
        "max_tokens": sampling.pop("max_new_tokens"),
        "stream": bool(asked.get("stream")),
        "return_token_ids": True,
        **sampling,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return msgspec.structs.replace(request, endpoint="completions", body=body)


async def answers(requests: Sequence[Request], url: str, concurrency: int, title: str) -> list[Answer]:
    """In the order of `requests`, with progress on stderr."""
    found: dict[int, Answer] = {}
    waiting = list(reversed(list(enumerate(requests))))
    said = started = time.monotonic()

    async def one_by_one() -> None:
        nonlocal said
        while waiting:
            place, request = waiting.pop()
            found[place] = await ask(http, url, request.endpoint, request.body)
            if time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                print(
                    f"  {title}: {len(found)}/{len(requests)} after {said - started:.0f} s", file=sys.stderr, flush=True
                )

    async with client(concurrency) as http, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_by_one())
    return [found[place] for place in range(len(requests))]


def differences(requests: Sequence[Request], expected: Sequence[Outcome], got: Sequence[Answer]) -> list[str]:
    """One for each answer that is not the expected one."""
    return [
        _difference(request.name, want, answer.outcome)
        for request, want, answer in zip(requests, expected, got, strict=True)
        if want != answer.outcome
    ]


def _difference(name: str, expected: Outcome, got: Outcome) -> str:
    """Every field that differs, in full."""
    pairs = zip(Outcome.__struct_fields__, msgspec.structs.astuple(expected), msgspec.structs.astuple(got), strict=True)
    lines = [f"      {field}: aggregated {ours!r}, pair {theirs!r}" for field, ours, theirs in pairs if ours != theirs]
    return f"DIFFERENT {name}\n" + "\n".join(lines)


def false_hits(requests: Sequence[Request], got: Sequence[Answer]) -> list[str]:
    """What no prefix cache can have given: part of a page, or the whole prompt; or the answer does not say."""
    return [
        f"{request.name}: {answer.cached_tokens} tokens of {request.prompt_tokens} said to be cached"
        for request, answer in zip(requests, got, strict=True)
        if not answer.outcome.error
        and not (0 <= answer.cached_tokens < request.prompt_tokens and answer.cached_tokens % PAGE == 0)
    ]
