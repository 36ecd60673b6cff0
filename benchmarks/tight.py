"""Answers that outgrow a small pool while they run together, so that requests are retracted and restored."""

from __future__ import annotations

import random

from comparing import Request
from prompts import Writer, tokenizer

REQUESTS, NEW_TOKENS = 10, 64
WORKER_ARGS = ("--pool-mb", "16", "--reserve-tokens", "0")
"""22 pages of 16 tokens; ten requests come to need 6 or 7 each."""


def make_requests(seed: int) -> list[Request]:
    rng = random.Random(f"tight {seed}")
    writer = Writer(tokenizer(), rng)
    return [_request(number, writer.ids(rng.randint(24, 40))) for number in range(1, REQUESTS + 1)]


def _request(number: int, prompt: list[int]) -> Request:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return Request(
        name=f"#{number} {len(prompt)} tokens and {NEW_TOKENS} new ones",
        endpoint="generate",
        body={"input_ids": prompt, "sampling_params": sampling, "stream": number % 2 == 0},
        prompt_tokens=len(prompt),
        new_tokens=NEW_TOKENS,
    )
