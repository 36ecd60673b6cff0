"""`pdplane chat`: talk to a router (or a worker) in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from pdplane.settings import BadSetting

from .http import add_router_arguments, client, get, unreachable


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to it in the terminal",
        description="Chat with the model behind a router. An empty line or Ctrl-D ends; Ctrl-C stops an answer.",
    )
    parser.add_argument("message", nargs="*", help="say this once and end; otherwise a conversation")
    add_router_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer [256]")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy [0]")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    with client(args.url, args.api_key, timeout_s=300.0) as http:
        status, models = get(http, "/v1/models")
        if status != 200:
            raise BadSetting(f"{args.url} is not ready: {_said(models)}")
        if not models.get("data"):
            raise BadSetting(f"{args.url} serves no model")
        model = models["data"][0]["id"]
        conversation: list[dict[str, str]] = []
        if args.message:
            return _turn(http, model, conversation, " ".join(args.message), args)
        print(f"{model} at {args.url}; an empty line ends", file=sys.stderr)
        while text := _ask():
            _turn(http, model, conversation, text, args)
    return 0


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _turn(
    http: httpx.Client, model: str, conversation: list[dict[str, str]], text: str, args: argparse.Namespace
) -> int:
    conversation.append({"role": "user", "content": text})
    body = {
        "model": model,
        "messages": conversation,
        "stream": True,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    said = ""
    try:
        for piece in _stream(http, body):
            said += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except BadSetting as error:
        conversation.pop()
        print(f"error: {error}", file=sys.stderr)
        return 1
    print()
    conversation.append({"role": "assistant", "content": said})
    return 0


def _stream(http: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise BadSetting(_message(answer.read()))
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield _piece(json.loads(line[6:]))
    except httpx.HTTPError as error:
        raise unreachable(http, error) from None


def _piece(event: dict[str, Any]) -> str:
    if "error" in event:
        raise BadSetting(str(event["error"].get("message", event["error"])))
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def _message(body: bytes) -> str:
    try:
        return _said(json.loads(body))
    except ValueError:
        return body.decode(errors="replace")[:500]


def _said(answer: Any) -> str:
    """The words of an error answer, or all of it."""
    try:
        return str(answer["error"]["message"])
    except (KeyError, TypeError):
        return json.dumps(answer)[:500]
