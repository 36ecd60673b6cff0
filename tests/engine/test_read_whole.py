"""A prompt whose KV came from another engine, all of it: the last token is computed again for its logits, and the
answer has the bits of one engine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .test_prefix import EDGES, PAGE, TOKENS, Bench, random_prompt


@pytest.mark.parametrize("length", EDGES)
def test_what_was_read_whole_goes_on_as_in_one_engine(tiny: Path, length: int) -> None:
    one, prefill, decode = Bench(tiny), Bench(tiny), Bench(tiny)
    prompt = random_prompt(length)
    wanted = one.run("r", prompt, one.pages(length + TOKENS))
    held = prefill.pages(length)
    prefill.run("r", prompt, held, prefill_only=True)
    pages = decode.pages(length + TOKENS)
    for here, there in zip(decode.pools, prefill.pools, strict=True):
        here[pages[: len(held)]] = there[held]
    full = pages[: length // PAGE]
    before = decode.checksum(full)
    assert decode.run("r", prompt, pages, length) == wanted
    assert decode.checksum(full) == before
    assert sorted(decode.of("r")) == list(range(length, length + TOKENS))
    for position, logits in one.of("r").items():
        assert np.array_equal(decode.of("r")[position], logits), position


@pytest.mark.parametrize("length", EDGES)
def test_without_its_last_token_it_is_the_same(tiny: Path, length: int) -> None:
    """Decode had every full page itself and read nothing: what is behind them is computed here."""
    bench = Bench(tiny)
    prompt = random_prompt(length)
    pages = bench.pages(length + TOKENS)
    wanted = bench.run("whole", prompt, pages)
    shared = pages[: (length - 1) // PAGE]
    own = bench.pages(length + TOKENS - len(shared) * PAGE)
    assert bench.run("rest", prompt, shared + own, len(shared) * PAGE) == wanted
