"""A running request laid aside between two steps, and taken up again on other pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdplane.core.ids import PageId, Rid
from pdplane.engine.numpy_engine import NumpyEngine
from pdplane.worker.engine import StepOutput

from .test_scheduling import ask
from .tiny import run, tiny_engine, tokens_of

A = Rid("a")
AWAY = [PageId(page) for page in (30, 21, 25, 19, 28)]


@pytest.fixture
def bench(tiny: Path) -> tuple[NumpyEngine, Any]:
    return tiny_engine(tiny, fixed=True)


def steps(engine: NumpyEngine, count: int) -> list[StepOutput]:
    return [output for _ in range(count) for output in engine.step()]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("after", [1, 2, 6, 11])
def test_what_was_parked_goes_on_as_if_nothing_had_been(
    bench: tuple[NumpyEngine, Any], after: int, temperature: float
) -> None:
    engine, pool = bench
    sampling = {"max_tokens": 12, "temperature": temperature, "seed": 5}
    engine.add(ask("whole", 30, range(5), sampling=sampling))
    wanted = tokens_of(run(engine), "whole")
    engine.add(ask("a", 30, range(5), sampling=sampling))
    outputs = steps(engine, after)
    assert engine.park(A)
    pool[AWAY] = pool[:5]
    pool[:5] = 0xFF
    engine.resume(A, AWAY)
    assert tokens_of(outputs + run(engine), "a") == wanted


def test_a_parked_request_takes_part_in_no_step_and_keeps_nobody_busy(bench: tuple[NumpyEngine, Any]) -> None:
    engine, pool = bench
    engine.add(ask("a", 30, range(5), sampling={"max_tokens": 9}))
    engine.step()
    assert engine.park(A)
    assert not engine.busy()
    assert engine.step() == []
    before = pool[:5].copy()
    engine.add(ask("b", 30, range(8, 13)))
    assert {output.rid for output in run(engine)} == {"b"}
    assert np.array_equal(pool[:5], before)
    engine.resume(A, [PageId(page) for page in range(5)])
    assert len(tokens_of(run(engine), "a")) == 8


def test_pages_given_to_a_parked_request_are_not_taken(bench: tuple[NumpyEngine, Any]) -> None:
    engine, _ = bench
    engine.add(ask("a", 16, range(1), sampling={"max_tokens": 9}))
    engine.step()
    assert engine.park(A)
    engine.extend(A, [PageId(7)])
    engine.resume(A, [PageId(0)])
    assert not engine.busy()
    engine.extend(A, [PageId(7)])
    assert engine.busy()


def test_only_what_runs_is_parked(bench: tuple[NumpyEngine, Any]) -> None:
    engine, _ = bench
    engine.add(ask("a", 100, range(8)))
    assert not engine.park(A)  # its prompt waits
    engine.step()
    assert not engine.park(A)  # its prompt is not whole
    steps(engine, 1)
    assert engine.park(A)
    assert not engine.park(A)  # it is parked
    engine.resume(A, [PageId(page) for page in range(8)])
    run(engine)
    assert not engine.park(A)  # it has ended
    assert not engine.park(Rid("stranger"))
    engine.resume(Rid("stranger"), AWAY)
    assert not engine.busy()


def test_an_abort_of_a_parked_request_is_over_at_once(bench: tuple[NumpyEngine, Any]) -> None:
    engine, _ = bench
    engine.add(ask("a", 30, range(5), sampling={"max_tokens": 9}))
    engine.step()
    assert engine.park(A)
    assert engine.abort(A)
    assert not engine.abort(A)
    engine.resume(A, AWAY)
    assert not engine.busy()
    engine.add(ask("a", 30, range(5)))
    assert len(tokens_of(run(engine), "a")) == 4
