"""What a hand-off adds: the pair through the router, less one server asked directly; both for each prompt."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence
from typing import Any

from asked import Told, ask
from prompts import Writer, tokenizer
from rows import Rows
from sides import MODEL

NEW_TOKENS = 16
WARM_UPS = 2


@dataclasses.dataclass(frozen=True)
class Added:
    """In seconds, over prompts whose pair did not stall: medians of one server, of the pair, of what the pair took
    longer for the same prompt."""

    who: str
    tokens: int
    repeats: int
    stalls: int
    first: Medians
    total: Medians

    def __str__(self) -> str:
        return f"  {self.who:<10}{self.tokens:>7}{self.repeats:>9}{self.stalls:>8}{self.first}{self.total}"


@dataclasses.dataclass(frozen=True)
class Medians:
    alone_s: float
    pair_s: float
    added_s: float

    @classmethod
    def of(cls, alone_s: Sequence[float], pair_s: Sequence[float]) -> Medians:
        """Of two servers' times for the same prompts, in the same order."""
        added_s = [pair - alone for alone, pair in zip(alone_s, pair_s, strict=True)]
        return cls(*(statistics.median(values) for values in (alone_s, pair_s, added_s)))

    def __str__(self) -> str:
        return f"{self.alone_s * 1e3:>11.1f}{self.pair_s * 1e3:>11.1f}{self.added_s * 1e3:>+11.1f}"


HEAD = (
    f"  {'':<10}{'tokens':>7}{'repeats':>9}{'stalls':>8}{'alone':>11}{'pair':>11}{'added':>11}"
    f"{'alone':>11}{'pair':>11}{'added':>11}"
)
TITLE = f"  {'':<34}{'time to first text, ms':^33}{f'{NEW_TOKENS} tokens in all, ms':^33}"


async def added_time(
    rows: Rows, who: str, alone: str, front: str, lengths: Sequence[int], repeats: int, seed: int
) -> list[Added]:
    """`alone`, `front`: URLs of the one server and of the router."""
    writer = Writer(tokenizer(), random.Random(seed), plain=True)
    for length in [*lengths, lengths[-1]][: WARM_UPS + 1]:
        await _both(alone, front, writer.ids(length), pair_first=True)
    found = []
    for length in lengths:
        told = [await _both(alone, front, writer.ids(length), pair_first=bool(i % 2)) for i in range(repeats)]
        smooth = [(one, pair) for one, pair in told if not pair.stalled(one)]
        for one, pair in told:
            if (one, pair) not in smooth:
                rows.stalled(pair.total_s)
        got = f"{len(smooth)} of {len(told)} did not stall"
        tried = f"prompts of {length} tokens, one server and the pair"
        rows.add(tried, "at least one without a stall", got, bool(smooth))
        if smooth:
            found.append(_added(who, length, len(told), smooth))
    return found


def _added(who: str, length: int, repeats: int, smooth: Sequence[tuple[Told, Told]]) -> Added:
    first = Medians.of([one.first_text_s for one, _ in smooth], [pair.first_text_s for _, pair in smooth])
    total = Medians.of([one.total_s for one, _ in smooth], [pair.total_s for _, pair in smooth])
    return Added(who, length, repeats, repeats - len(smooth), first, total)


async def _both(alone: str, front: str, prompt: list[int], *, pair_first: bool) -> tuple[Told, Told]:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    told: dict[str, Told] = {}
    for url in (front, alone) if pair_first else (alone, front):
        told[url] = await ask(url, "completions", body)
        if told[url].error:
            raise RuntimeError(f"{url} answered {told[url]}")
    return told[alone], told[front]
