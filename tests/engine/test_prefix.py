"""A prompt whose first tokens already have their KV in pages that other requests share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pdplane.core.ids import PageId, Rid
from pdplane.core.layout import pages_for
from pdplane.engine.numpy_engine import NumpyEngine, attach_pools
from pdplane.worker.engine import EngineRequest, Sampling

from .tiny import bare_engine, run

PAGE = 16
PAGES = 40
TOKENS = 5
EDGES = [
    PAGE - 1,
    PAGE,
    PAGE + 1,
    63,  # around a chunk's end
    64,
    65,
    2 * 64 - 1,
    2 * 64,
    2 * 64 + 1,
]


class Bench:
    """An engine over two ranks, and its logits."""

    def __init__(self, folder: Path, *, fixed: bool = True) -> None:
        self.engine: NumpyEngine = bare_engine(folder, fixed=fixed, page_size=PAGE)
        self.pools = attach_pools(self.engine, PAGES, 2)
        self.engine.on_logits = lambda rid, position, logits: self.logits.update({(rid, position): logits})
        self.logits: dict[tuple[str, int], np.ndarray] = {}
        self._free = [PageId(page) for page in range(PAGES)]

    def pages(self, tokens: int) -> list[PageId]:
        return [self._free.pop() for _ in range(pages_for(tokens, PAGE))]

    def run(
        self, name: str, prompt: Sequence[int], pages: list[PageId], computed: int = 0, *, prefill_only: bool = False
    ) -> list[int]:
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        self.engine.add(
            EngineRequest(
                rid=Rid(name),
                prompt=prompt,
                sampling=sampling,
                pages=pages,
                computed=computed,
                prefill_only=prefill_only,
            )
        )
        outputs = run(self.engine)
        assert outputs[-1].finish == "length", outputs[-1].error
        return [output.token.id for output in outputs if output.token is not None]

    def checksum(self, pages: Sequence[PageId]) -> str:
        digest = hashlib.blake2b()
        for pool in self.pools:
            digest.update(pool[list(pages)].tobytes())
        return digest.hexdigest()

    def of(self, name: str) -> dict[int, np.ndarray]:
        return {position: logits for (rid, position), logits in self.logits.items() if rid == name}


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng([seed, length]).integers(0, 256, length)]


def hits(length: int) -> dict[str, int]:
    """Cached tokens: full pages, in part or all of them, and the whole prompt where it ends a page."""
    full = length // PAGE * PAGE
    return {"none": 0, "one page": min(PAGE, full), "half": full // 2 // PAGE * PAGE, "all full pages": full}


@pytest.mark.parametrize("length", EDGES)
def test_every_hit_gives_the_bits_of_no_hit(tiny: Path, length: int) -> None:
    bench = Bench(tiny)
    prompt = random_prompt(length)
    first = bench.pages(length + TOKENS)
    wanted = bench.run("uncached", prompt, first)
    for name, cached in hits(length).items():
        shared = first[: cached // PAGE]
        before = bench.checksum(shared)
        own = bench.pages(length + TOKENS - cached)
        assert bench.run(name, prompt, shared + own, cached) == wanted
        assert bench.checksum(shared) == before
        found = bench.of(name)
        assert sorted(found) == list(range(length, length + TOKENS))
        for position, logits in bench.of("uncached").items():
            assert np.array_equal(found[position], logits), (name, position)
        bench._free += own


@pytest.mark.parametrize("fixed", [False, True], ids=["fast", "fixed"])
def test_shared_pages_are_only_read_while_others_run_on_them(tiny: Path, fixed: bool) -> None:
    """One prompt that is wholly cached, and two that go on behind it. What is cached was changed a little, so that a
    tile that is computed again would write other bytes, if it wrote them."""
    bench = Bench(tiny, fixed=fixed)
    prefix = random_prompt(80)
    shared = bench.pages(80)
    bench.run("first", prefix, shared, prefill_only=True)
    for pool in bench.pools:
        pool[shared] = (pool[shared].view(np.float32) * np.float32(1.01)).view(np.uint8)
    before = bench.checksum(shared)
    for name, tail in (("whole", []), ("short", random_prompt(3, 1)), ("long", random_prompt(70, 2))):
        own = bench.pages(len(tail) + TOKENS)
        bench.run(name, prefix + tail, shared + own, 80)
        assert bench.checksum(shared) == before


def test_a_whole_prompt_that_ends_inside_a_page_is_sampled_without_a_write(tiny: Path) -> None:
    bench = Bench(tiny)
    prompt = random_prompt(70)
    pages = bench.pages(70)
    (wanted,) = bench.run("first", prompt, pages, prefill_only=True)
    before = bench.checksum(pages)
    assert bench.run("again", prompt, pages, 70, prefill_only=True) == [wanted]
    assert bench.checksum(pages) == before
    assert np.array_equal(bench.of("again")[70], bench.of("first")[70])


def test_a_cached_prefix_saves_the_chunks_that_it_covers(tiny: Path) -> None:
    bench = Bench(tiny)
    prompt = random_prompt(200)
    pages = bench.pages(200)
    bench.run("first", prompt, pages, prefill_only=True)
    sampling = Sampling(max_tokens=1, temperature=0.0)
    bench.engine.add(EngineRequest(rid=Rid("b"), prompt=prompt, sampling=sampling, pages=pages, computed=144))
    assert [output.computed for output in run(bench.engine)] == [192, 200]
