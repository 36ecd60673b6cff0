"""One request by a client that can leave, and what it was told: each choice's text, tokens and end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from client import Call

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LIMIT_S = 180.0
STALL_S = 5.0
"""NIXL's transfers on a CPU stall now and then until about the end of prefill's lease: an answer that took so much
longer than one server's is counted as one that had a stall."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """`tokens`: empty where the server does not tell them."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    finish: str = ""

    def __add__(self, more: Choice) -> Choice:
        return Choice(self.text + more.text, self.tokens + more.tokens, more.finish or self.finish)


@dataclasses.dataclass(frozen=True)
class Told:
    """`ids`: of the request as a router tells it, and of the answer. `error`: as `code: message`, or how it broke off.
    `first_text_s`, `total_s`: since it was asked."""

    ids: tuple[str, str]
    status: int
    choices: dict[int, Choice]
    error: str
    usage: dict[str, Any]
    headers: dict[str, str]
    first_text_s: float
    total_s: float

    def stalled(self, alone: Told) -> bool:
        """`alone`: the same asked of one server, which hands nothing over."""
        return self.total_s > alone.total_s + STALL_S

    def outcome(self) -> tuple[int, dict[int, Choice], str]:
        """What must not depend on who served."""
        return self.status, self.choices, self.error

    def __str__(self) -> str:
        if self.error or self.status != 200:
            return f"{self.status} {self.error}".strip()
        return " | ".join(f"{choice.text[:30]!r} ({choice.finish})" for choice in self.choices.values())


async def ask(url: str, endpoint: str, body: dict[str, Any], limit_s: float = LIMIT_S) -> Told:
    """`endpoint`: a key of PATHS. Nothing is raised for an answer that is an error, late or broken off."""
    call = Call(url, PATHS[endpoint], body)
    try:
        async with asyncio.timeout(limit_s):
            await call.send()
            await call.read_all()
    except TimeoutError:
        call.broken = f"no end after {limit_s:g} s"
    except OSError as error:
        call.broken = f"{type(error).__name__}: {error}"
    finally:
        call.close()
    return told(call)


def told(call: Call) -> Told:
    parts = call.events or [plain(call.body)]
    choices: dict[int, Choice] = {}
    for part in parts:
        for said in part.get("choices") or []:
            index = said.get("index", 0)
            choices[index] = choices.get(index, Choice()) + _choice(said)
    usage: dict[str, Any] = next((part["usage"] for part in reversed(parts) if part.get("usage")), {})
    ended = call.ended_at or call.first_byte_at or call.sent_at
    return Told(
        ids=(call.headers.get("x-request-id", ""), next((str(part["id"]) for part in parts if "id" in part), "")),
        status=call.status,
        choices=dict(sorted(choices.items())),
        error=_error(call, parts),
        usage=usage,
        headers=call.headers,
        first_text_s=call.first_byte_at - call.sent_at if call.first_byte_at else 0.0,
        total_s=ended - call.sent_at,
    )


def plain(body: bytes) -> dict[str, Any]:
    """A JSON object; {} where it is none."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _choice(said: dict[str, Any]) -> Choice:
    place = said.get("message") or said.get("delta") or said
    text = place.get("text", place.get("content")) or ""
    return Choice(text, tuple(said.get("token_ids") or ()), said.get("finish_reason") or "")


def _error(call: Call, parts: list[dict[str, Any]]) -> str:
    for part in parts:
        if isinstance(error := part.get("error"), dict):
            return f"{error.get('code')}: {error.get('message')}"
    if call.broken:
        return call.broken
    if call.status >= 400:
        return call.body[:200].decode(errors="replace")
    return "" if call.done or not call.events else "the stream ended without [DONE]"
