"""The work that every contender of benchmarks/transport.py is given: scattered pages from one process to another, each
round checked. Needs numpy alone, as the contenders live in two environments."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

BLANK = 0xEE
WARM_UPS = 2
"""Rounds before the clock: connections, registrations and page faults."""


@dataclass(frozen=True)
class Job:
    pages: int
    page_bytes: int
    rounds: int
    variant: str = ""

    @property
    def size_bytes(self) -> int:
        return self.pages * self.page_bytes

    def fill(self, source: np.ndarray) -> None:
        """[page][byte]; the same in every process."""
        source[:] = np.random.default_rng(7).integers(0, 256, source.shape, np.uint8)

    def order(self) -> tuple[np.ndarray, np.ndarray]:
        """Page src[i] goes to page dst[i]: both shuffled."""
        rng = np.random.default_rng(8)
        return rng.permutation(self.pages), rng.permutation(self.pages)

    def blank(self, target: np.ndarray) -> None:
        target[:] = BLANK

    def check(self, target: np.ndarray) -> None:
        """AssertionError where a byte is not where it belongs."""
        assert np.array_equal(target, expected(self)), "pages arrived wrong"


@functools.cache
def expected(job: Job) -> np.ndarray:
    """The target after a round."""
    source, target = (np.empty((job.pages, job.page_bytes), np.uint8) for _ in range(2))
    job.fill(source)
    src, dst = job.order()
    target[dst] = source[src]
    return target


def tell(far: Connection, verb: str) -> None:
    """Has the other process blank or check its target. AssertionError where that is wrong."""
    far.send(verb)
    assert far.recv() == "", "the other process found wrong pages"


def obey(initiator: Connection, job: Job, target: np.ndarray) -> None:
    """The next `tell`. EOFError where the initiator is gone."""
    verb = initiator.recv()
    try:
        getattr(job, verb)(target)
        initiator.send("")
    except AssertionError as wrong:
        initiator.send(str(wrong))


def job_from_arguments(description: str | None) -> Job:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--page-bytes", type=int, default=64 << 10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--variant", default="")
    return Job(**vars(parser.parse_args()))


def report(seconds: list[float]) -> None:
    """The one line that benchmarks/transport.py reads: what each round took."""
    print(json.dumps({"seconds": seconds}), flush=True)


def missing(why: str) -> None:
    print(json.dumps({"missing": why}), flush=True)


def in_another_process(serve: Callable[..., None], *arguments: Any) -> Connection:
    """Runs serve(connection, *arguments) in a fresh interpreter; this end of its connection."""
    context = get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=serve, args=(there, *arguments), daemon=True).start()
    there.close()
    return here
