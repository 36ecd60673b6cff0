"""The same text as one server: every way to ask, by the pair and by a single server."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from asked import Told, ask
from prompts import Writer, tokenizer
from rows import Rows
from sides import MODEL, metrics, total

NEW_TOKENS = 16
BY_PAIR = "pd"
ALONE_TOKENS = 1
"""A prompt of so many is decode's to compute: its last token always is, and what is before it is handed over."""

HandedOver = Callable[[Sequence[str]], Awaitable[bool]]
FROM_PREFILL = 'source="external_kv_transfer"'


@dataclasses.dataclass(frozen=True)
class Case:
    """`samples`: answers that it brings. `alone`: its prompt is decode's to compute."""

    name: str
    endpoint: str
    body: dict[str, Any]
    samples: int = 1
    alone: bool = False


def edges(block: int) -> tuple[int, ...]:
    """Lengths of prompts, in tokens: around one, two and three blocks, and far from them."""
    return (1, 5, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 3 * block, 200)


def cases(block: int, seed: int) -> list[Case]:
    return list(_cases(block, Writer(tokenizer(), random.Random(seed))))


def _cases(block: int, writer: Writer) -> Iterator[Case]:
    common = {"model": MODEL, "temperature": 0, "max_tokens": NEW_TOKENS, "return_token_ids": True}
    for length in edges(block):
        body = {**common, "prompt": writer.text(length), "ignore_eos": True}
        alone = length == ALONE_TOKENS
        yield Case(f"completions, {length} token{'' if alone else 's'}", "completions", body, alone=alone)
    yield Case("completions, token ids", "completions", {**common, "prompt": writer.ids(70)})
    for turns, length in ((1, 20), (3, 30)):
        body = {**common, "messages": _messages(writer, turns, length)}
        yield Case(f"chat, {turns} turn{'s' if turns > 1 else ''}", "chat", body)
    two = [writer.text(20), writer.text(block + 1)]
    yield Case("completions, list of 2 prompts", "completions", {**common, "prompt": two}, samples=2)
    sampled = {**common, "temperature": 0.8, "seed": 7, "n": 2}  # vLLM takes no n > 1 at temperature 0
    yield Case("completions, n = 2, seeded", "completions", {**sampled, "prompt": writer.text(40)}, samples=2)
    yield Case("chat, n = 2, seeded", "chat", {**sampled, "messages": _messages(writer, 1, 25)}, samples=2)
    both = [writer.text(9), writer.text(45)]
    yield Case("completions, 2 prompts, n = 2, seeded", "completions", {**sampled, "prompt": both}, samples=4)


def _messages(writer: Writer, turns: int, length: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    spoken = [{"role": roles[turn % 2], "content": writer.text(length)} for turn in range(turns)]
    return [{"role": "system", "content": "You answer in one sentence."}, *spoken]


async def same_texts(
    rows: Rows, single: str, front: str, asked: list[Case], handed_over: HandedOver | None = None
) -> int:
    """Each case plain and streamed, by `front` (URL of the router) and by `single`; prompt tokens that went by it.
    `handed_over`: whether decode had a request's KV from prefill. Else it would have computed the prompt itself."""
    prompt_tokens = 0
    for case in asked:
        expected = await ask(single, case.endpoint, case.body)
        for stream in (False, True):
            body = case.body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
            told = await ask(front, case.endpoint, body)
            if told.stalled(expected):
                rows.stalled(told.total_s)
            fault = difference(case, expected, told)
            if handed_over and not fault and not case.alone and not await handed_over(told.ids):
                fault = "decode had it not from prefill"
            name = f"{case.name}, {'streamed' if stream else 'plain'}"
            rows.add(name, "as the single server", fault or same(told, expected), not fault)
            prompt_tokens += told.usage.get("prompt_tokens", 0)
    return prompt_tokens


def same(told: Told, expected: Told) -> str:
    """What was alike, in few words."""
    tokens = sum(len(choice.tokens) for choice in told.choices.values())
    what = f"{tokens} tokens" if tokens else f"{told.usage.get('completion_tokens', 0)} tokens' text"
    late = f"; stalled, {told.total_s:.1f} s" if told.stalled(expected) else ""
    return f"the same {what} in {len(told.choices)} choice{'s' if len(told.choices) > 1 else ''}{late}"


def difference(case: Case, expected: Told, told: Told) -> str:
    """ "" where they are alike and complete."""
    if expected.error or len(expected.choices) != case.samples:
        return f"the single server itself: {expected}"
    if told.outcome() != expected.outcome():
        return f"{told} instead of {expected}"
    if told.headers.get("x-pd-mode", BY_PAIR) != BY_PAIR:  # vLLM's router does not say
        return f"served {told.headers['x-pd-mode']}, not by the pair"
    mine, theirs = (
        [side.usage.get(key) for key in ("prompt_tokens", "completion_tokens")] for side in (told, expected)
    )
    return "" if mine == theirs else f"usage {mine} instead of {theirs}"


@dataclasses.dataclass
class Sources:
    """Where a decode of vLLM got its prompts' tokens from, in tokens."""

    transferred: float
    computed: float
    cached: float

    @classmethod
    async def of(cls, url: str) -> Sources:
        text = await metrics(url)
        name = "vllm:prompt_tokens_by_source_total"
        labels = (FROM_PREFILL, 'source="local_compute"', 'source="local_cache_hit"')
        return cls(*(total(text, name, label) for label in labels))

    def __sub__(self, before: Sources) -> Sources:
        return Sources(
            self.transferred - before.transferred, self.computed - before.computed, self.cached - before.cached
        )
