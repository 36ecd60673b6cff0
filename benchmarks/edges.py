"""Prompts that end just before, at and just behind a page's end, with no, a full and a partial prefix hit.

Each length is asked three times: a new prompt; the same again, of which all full pages are cached; and one that shares
half of those pages and half a page more. Between the three nothing runs, so that every hit is known beforehand.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from comparing import PAGE, Request
from prompts import Writer, tokenizer

NEW_TOKENS = 8
HITS = ("no", "full", "partial")


class Edges:
    """`waves[hit]` are requests, `hits[hit]` the cached tokens that each must report. `decode_hits[hit]`: of how many
    one decode that met them all has pages already, where it computes nothing of a prompt: all of them, or some."""

    def __init__(self, pages: Sequence[int], seed: int) -> None:
        writer = Writer(tokenizer(), random.Random(f"edges {seed}"))
        first = _unlike_starts(writer, [count * PAGE + off for count in pages for off in (-1, 0, 1)])
        other = [_partly(prompt, writer) for prompt in first]
        self.waves: dict[str, list[Request]] = {}
        self.hits: dict[str, list[int]] = {}
        self.decode_hits: dict[str, Counter[str]] = {}
        for hit, prompts in zip(HITS, (first, first, other), strict=True):
            self.waves[hit] = [_request(place, hit, prompt) for place, prompt in enumerate(prompts)]
            self.hits[hit] = [_cached(hit, len(prompt)) for prompt in prompts]
            self.decode_hits[hit] = Counter(kind for prompt in prompts if (kind := _at_decode(hit, len(prompt))))

    @property
    def requests(self) -> list[Request]:
        return [request for wave in self.waves.values() for request in wave]


def _unlike_starts(writer: Writer, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths, no two of which begin with the same page."""
    prompts: list[list[int]] = []
    for length in lengths:
        prompt = writer.ids(length)
        while any(prompt[: PAGE // 2] == other[: PAGE // 2] for other in prompts):
            prompt = writer.ids(length)
        prompts.append(prompt)
    return prompts


def _shared_pages(length: int) -> int:
    return length // PAGE // 2


def _partly(prompt: list[int], writer: Writer) -> list[int]:
    """As long, and alike for half of the full pages and half a page more."""
    alike = min(_shared_pages(len(prompt)) * PAGE + PAGE // 2, len(prompt) - 1)
    rest = writer.ids(len(prompt) - alike)
    while rest[0] == prompt[alike]:
        rest = writer.ids(len(prompt) - alike)
    return prompt[:alike] + rest


def _cached(hit: str, length: int) -> int:
    """Never the whole prompt: the last token is always computed."""
    pages = {"no": 0, "full": (length - 1) // PAGE, "partial": _shared_pages(length)}[hit]
    return pages * PAGE


def _at_decode(hit: str, length: int) -> str:
    """The row brings the first token, so a prompt that ends with a page may be there whole."""
    pages = {"no": 0, "full": length // PAGE, "partial": _shared_pages(length)}[hit]
    return "full" if pages * PAGE == length else "partial" if pages else ""


def _request(place: int, hit: str, prompt: list[int]) -> Request:
    """By turns over the ways in which usage is told."""
    name = f"{len(prompt)} tokens, {hit} hit"
    way = ("generate", "stream", "whole")[place % 3]
    if way == "generate":
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    else:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if way == "stream" else {}
    return Request(
        name=f"{name} ({way})",
        endpoint="generate" if way == "generate" else "completions",
        body=body,
        prompt_tokens=len(prompt),
        new_tokens=NEW_TOKENS,
    )
