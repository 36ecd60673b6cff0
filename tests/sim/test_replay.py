"""A seed is a bug report: it replays to the byte, anywhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from pdplane.sim.run import replay_main, run_broken, run_seed, sim_main

WORLDS = ((4, "rooms"), (10, "rooms"), (18, "rooms"), (4, "params"), (21, "params"), (30, "params"))
_PRINT_DIGEST = f"""
import hashlib
from pdplane.sim.run import run_seed
for seed, dialect in {WORLDS}:
    lines = run_seed(seed, dialect=dialect, trace=True).lines
    print(hashlib.sha256("\\n".join(lines).encode()).hexdigest())
"""


def _digest(seed: int, dialect: str | None = None) -> str:
    return hashlib.sha256("\n".join(run_seed(seed, dialect=dialect, trace=True).lines).encode()).hexdigest()


def test_the_same_seed_gives_the_same_log() -> None:
    assert [_digest(*world) for world in WORLDS] == [_digest(*world) for world in WORLDS]


def test_another_process_with_other_hashes_gives_the_same_log() -> None:
    logs = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_DIGEST], env=env, capture_output=True, text=True, check=True
        )
        logs.append(done.stdout.split())
    assert logs[0] == logs[1] == [_digest(*world) for world in WORLDS]


def test_tracing_changes_nothing() -> None:
    quiet, loud = run_seed(7), run_seed(7, trace=True)
    assert (quiet.events, quiet.verdicts, quiet.virtual_s) == (loud.events, loud.verdicts, loud.virtual_s)
    assert quiet.lines == []


def test_other_seeds_give_other_runs() -> None:
    assert _digest(4) != _digest(22)


def test_replay_prints_the_trace_and_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_main(0) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["0.000000", "p0#1", "starts"]
    assert out[-1].startswith("all rules held; ends: {'ok': ")


def test_replay_of_a_fault_ends_with_the_violation(capsys: pytest.CaptureFixture[str]) -> None:
    (caught,) = run_broken(["free_at_abort"])
    assert caught.seed is not None
    assert replay_main(caught.seed, pattern="cancels", fence=False, broken="free_at_abort", tail=5) == 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 7
    assert out[-1].startswith("VIOLATION O4: ")


def test_the_report_counts_seeds_patterns_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_main(20, jobs=1, broken=False) == 0
    out = capsys.readouterr().out
    assert out.startswith("20 seeds in ")
    assert "zero violations" in out


@pytest.mark.parametrize("main", [lambda: sim_main(1, pattern="sunny"), lambda: replay_main(1, pattern="sunny")])
def test_an_unknown_pattern_is_a_clear_error(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(main)
    assert main() == 2
    assert "there is no pattern 'sunny'; choose one of calm, " in capsys.readouterr().err
