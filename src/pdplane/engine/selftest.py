"""Is the engine batch-invariant on this machine? Runs the same prompts in other company and compares bits.

BLAS picks its kernels by CPU, so that the tiles of panels.py promise nothing by themselves: this shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdplane.core.ids import PageId, Rid
from pdplane.core.layout import pages_for
from pdplane.worker.engine import EngineRequest, Sampling

from .errors import ModelError
from .numpy_engine import NumpyEngine, attach_pools
from .safetensors_file import Array

PROBE_LENGTHS = (1, 7, 23, 64, 70, 133)
NEIGHBOURS = 6
STEPS = 6

Prompt = tuple[int, ...]
Logits = dict[tuple[str, int], Array]


@dataclass(frozen=True)
class Invariance:
    """`compared` rows of logits; `differences` names every row that was not bit-equal, and by how much."""

    compared: int
    differences: tuple[str, ...]

    @property
    def identical(self) -> bool:
        return not self.differences


def batch_invariance(engine: NumpyEngine, *, seed: int = 0) -> Invariance:
    """Compares each probe alone with: in company, on other pages, with its KV heads split over two pools, with a cached
    prefix, with its last token computed again, and handed over to another engine after its prefill. Uses pools of its
    own; `engine` is left alone."""
    probes = _prompts(engine, seed)
    alone: Logits = {}
    for name, prompt in probes.items():
        alone |= _Run(engine, reverse=False).together({name: prompt})
    others = _neighbours(engine, seed)
    cases = {
        "in company": _Run(engine, reverse=True).together(others | probes),
        "behind others": _Run(engine, reverse=False).together(dict(reversed((probes | others).items()))),
        "over two ranks": _Run(engine, reverse=True, ranks=2).together(others | probes),
        "cached prefix": _resumed(engine, probes, cached=lambda prompt: len(prompt) // 2),
        "last token again": _resumed(engine, probes, cached=len),
        "handed over": _handed_over(engine, probes, others),
    }
    differences: list[str] = []
    compared = 0
    for case, found in cases.items():
        rows = [key for key in found if key in alone]
        compared += len(rows)
        differences += [
            f"{case}: prompt of {len(probes[name])} tokens, position {position}, by "
            f"{np.abs(found[name, position] - alone[name, position]).max():.2e}"
            for name, position in rows
            if not np.array_equal(found[name, position], alone[name, position])
        ]
    return Invariance(compared, tuple(differences))


class _Run:
    """A sibling engine with pools; `reverse` hands out the pages from the other end."""

    def __init__(self, engine: NumpyEngine, *, reverse: bool, ranks: int = 1) -> None:
        self.engine = engine.sibling()
        self.logits: Logits = {}
        self.engine.on_logits = self._record
        spec = engine.model
        count = sum(pages_for(length + STEPS, spec.page_size) for length in (*PROBE_LENGTHS, *[40] * NEIGHBOURS))
        self.pools = attach_pools(self.engine, count, ranks)
        for pool in self.pools:
            pool.view(np.float32)[:] = np.nan  # what was never written must never be read
        self._free = [PageId(page) for page in (range(count) if reverse else reversed(range(count)))]

    def _record(self, rid: Rid, position: int, logits: Array) -> None:
        self.logits[rid, position] = logits

    def pages(self, prompt: Prompt) -> list[PageId]:
        return [self._free.pop() for _ in range(pages_for(len(prompt) + STEPS, self.engine.model.page_size))]

    def add(
        self,
        name: str,
        prompt: Prompt,
        pages: list[PageId],
        *,
        computed: int = 0,
        prior: tuple[int, ...] = (),
        tokens: int = STEPS,
    ) -> None:
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(
            EngineRequest(rid=Rid(name), prompt=prompt, sampling=sampling, pages=pages, computed=computed, prior=prior)
        )

    def finish(self) -> dict[str, int]:
        """Runs until idle; the first token that each request sampled."""
        first: dict[str, int] = {}
        while self.engine.busy():
            for output in self.engine.step():
                assert output.finish != "error", output.error
                if output.token is not None:
                    first.setdefault(output.rid, output.token.id)
        return first

    def together(self, prompts: dict[str, Prompt]) -> Logits:
        for name, prompt in prompts.items():
            self.add(name, prompt, self.pages(prompt))
        self.finish()
        return self.logits


def _resumed(engine: NumpyEngine, probes: dict[str, Prompt], cached: Callable[[Prompt], int]) -> Logits:
    """Each probe's prompt once, then again on the same pages as if `cached(prompt)` tokens were found there."""
    run = _Run(engine, reverse=True)
    pages = {name: run.pages(prompt) for name, prompt in probes.items()}
    for name, prompt in probes.items():
        run.add(name, prompt, pages[name], tokens=1)
    run.finish()
    run.logits.clear()
    for name, prompt in probes.items():
        run.add(name, prompt, pages[name], computed=cached(prompt))
    run.finish()
    return run.logits


def _handed_over(engine: NumpyEngine, probes: dict[str, Prompt], others: dict[str, Prompt]) -> Logits:
    source, target = _Run(engine, reverse=False), _Run(engine, reverse=True)
    for name, prompt in others.items():
        target.add(name, prompt, target.pages(prompt))
    pairs = {name: (source.pages(prompt), target.pages(prompt)) for name, prompt in probes.items()}
    for name, prompt in probes.items():
        source.add(name, prompt, pairs[name][0], tokens=1)
    first = source.finish()
    for name, (theirs, ours) in pairs.items():
        for ours_of_rank, theirs_of_rank in zip(target.pools, source.pools, strict=True):
            ours_of_rank[ours] = theirs_of_rank[theirs]
        target.add(name, probes[name], ours, computed=len(probes[name]), prior=(first[name],))
    target.finish()
    return target.logits


def _prompts(engine: NumpyEngine, seed: int) -> dict[str, Prompt]:
    lengths = [length for length in PROBE_LENGTHS if length + STEPS < engine.model.context_len]
    return {f"probe{length}": _random_prompt(engine, length, seed + length) for length in lengths}


def _neighbours(engine: NumpyEngine, seed: int) -> dict[str, Prompt]:
    return {f"other{n}": _random_prompt(engine, 5 + 7 * n, seed + 1000 + n) for n in range(NEIGHBOURS)}


def _random_prompt(engine: NumpyEngine, length: int, seed: int) -> Prompt:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, engine.model.vocab_size, length))


def main() -> int:
    """Tests the embedded model in batch-invariant mode, prints what was found; exit status 1 where bits differ."""
    from .loading import load_numpy

    try:
        engine, _ = load_numpy(None, batch_invariant=True, progress=print)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    result = batch_invariance(engine)
    for difference in result.differences:
        print(difference)
    verdict = "all bit-equal" if result.identical else f"{len(result.differences)} differ"
    print(f"{engine.model.name}: {result.compared} rows of logits compared, {verdict}")
    return 0 if result.identical else 1
