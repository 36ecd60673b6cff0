"""The requests of the equality run: which endpoint, which length, how it ends. All greedy, all from one seed."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
from asking import Answer, ask
from httpx import AsyncClient
from prompts import Writer, log_uniform, shares, tokenizer

from pdplane.engine.tokenizer import FolderTokenizer

LONGEST = 2_000
ENDPOINTS = (("completions", 3), ("chat", 4), ("token ids", 2), ("generate", 1))
STREAMS = (("stream", 1), ("whole", 1))
ENDS = (("max_tokens 16", 2), ("max_tokens 1", 2), ("stop text", 1), ("stop id", 1))
"""`stop text` and `stop id`: the first token, as text and as id, is what stops."""

FEW, MANY = 1, 16


class Case(msgspec.Struct, kw_only=True):
    """`ids`: the prompt as the model sees it. `endpoint`: a key of asking.PATHS. `body`: whole after finish_bodies."""

    number: int
    kind: str
    stream: bool
    end: str
    ids: list[int]
    endpoint: str
    body: dict[str, Any]

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        stream = "stream" if self.stream else "whole"
        return f"#{self.number} {self.kind}, {self.tokens} tokens, {stream}, {self.end}"


def make_cases(count: int, seed: int, longest: int = LONGEST) -> list[Case]:
    """Of 1 to `longest` tokens: lengths are spread over strata, endpoints and ends in fixed shares; what goes with
    what is drawn. Chats are at least as long as their template."""
    rng = random.Random(seed)
    words = tokenizer()
    writer = Writer(words, rng)
    template = len(words.chat([{"role": "user", "content": ""}]))
    lengths = log_uniform(count, 1, longest, rng)
    kinds = _kinds(lengths, template, rng)
    streams, ends = shares(count, STREAMS, rng), shares(count, ENDS, rng)
    cases = []
    for number, (kind, length, stream, end) in enumerate(zip(kinds, lengths, streams, ends, strict=True), 1):
        ids, prompt = _prompt(kind, length - template * (kind == "chat"), words, writer)
        cases.append(
            Case(
                number=number,
                kind=kind,
                stream=stream == "stream",
                end=end,
                ids=ids,
                endpoint="completions" if kind == "token ids" else kind,
                body=prompt,
            )
        )
    return cases


def _prompt(kind: str, length: int, words: FolderTokenizer, writer: Writer) -> tuple[list[int], dict[str, Any]]:
    """(ids of the whole prompt, the body's part that says it); `length` tokens without a template's own."""
    if kind == "token ids":
        ids = writer.ids(length)
        return ids, {"prompt": ids}
    text = writer.text(length)
    if kind == "chat":
        turns: list[dict[str, object]] = [{"role": "user", "content": text}]
        return words.chat(turns), {"messages": turns}
    return words.encode(text), {"text" if kind == "generate" else "prompt": text}


def _kinds(lengths: list[int], template: int, rng: random.Random) -> list[str]:
    """A chat goes only where it fits; its place is swapped with a longer prompt's that is no chat."""
    kinds = shares(len(lengths), ENDPOINTS, rng)
    for short in (i for i, length in enumerate(lengths) if kinds[i] == "chat" and length <= template):
        fitting = [i for i, length in enumerate(lengths) if kinds[i] != "chat" and length > template]
        if fitting:
            other = rng.choice(fitting)
            kinds[short], kinds[other] = kinds[other], kinds[short]
        else:
            kinds[short] = "completions"
    return kinds


async def finish_bodies(cases: list[Case], http: AsyncClient, url: str) -> None:
    """Adds sampling, limits and stops; for those that stop at their first token, `url` is asked which that is."""
    for case in cases:
        end = {"max_tokens": FEW if case.end == "max_tokens 1" else MANY}
        if case.end.startswith("stop"):
            end |= await _first_token(case, http, url)
        case.body |= _sampling(case, end)


async def _first_token(case: Case, http: AsyncClient, url: str) -> dict[str, Any]:
    """A first token without text of its own (part of a character, or special) can only be named by its id."""
    sampling = {"temperature": 0, "max_new_tokens": 1}
    answer: Answer = await ask(http, url, "generate", {"input_ids": case.ids, "sampling_params": sampling})
    text, ids = answer.outcome.text, answer.outcome.token_ids
    if not ids:
        raise RuntimeError(f"{case}: no first token: {answer.outcome}")
    if case.end == "stop text" and (not text or "\ufffd" in text):
        case.end = "stop id"
    return {"stop": [text]} if case.end == "stop text" else {"stop_token_ids": ids}


def _sampling(case: Case, end: dict[str, Any]) -> dict[str, Any]:
    if case.kind == "generate":
        end["max_new_tokens"] = end.pop("max_tokens")
        return {"sampling_params": {"temperature": 0, **end}, "stream": case.stream}
    usage = {"stream_options": {"include_usage": True}} if case.stream else {}
    return {"temperature": 0, "stream": case.stream, **usage, **end}


def mix(cases: list[Case]) -> list[str]:
    """What the run is made of, as lines."""
    lengths = sorted(case.tokens for case in cases)
    middle = lengths[len(lengths) // 2]
    rows = {
        "endpoint": Counter(case.kind for case in cases),
        "answer": Counter("stream" if case.stream else "whole" for case in cases),
        "end": Counter(case.end for case in cases),
    }
    lines = [f"{len(cases)} prompts, {lengths[0]} to {lengths[-1]} tokens, median {middle}, {sum(lengths):,} in all"]
    return lines + [
        f"  {name}: " + ", ".join(f"{n} {what}" for what, n in sorted(c.items())) for name, c in rows.items()
    ]
