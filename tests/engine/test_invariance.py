"""Batch-invariant mode: bits do not depend on company, pages, chunking of a cached prefix, or a hand-off."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np
import pytest

from pdplane.core.ids import PageId, Rid
from pdplane.engine.install import DEFAULT_MODEL
from pdplane.engine.model import DecodeRow, LlamaModel, Stop
from pdplane.engine.paged import PagedKV
from pdplane.engine.selftest import batch_invariance, main
from pdplane.worker.engine import EngineRequest, Sampling

from .tiny import attach, run, tiny_engine, tokens_of


def test_logits_are_bit_equal_whoever_shares_the_step(tiny: Path) -> None:
    engine, _ = tiny_engine(tiny, fixed=True)
    result = batch_invariance(engine)
    assert result.identical, result.differences
    assert result.compared > 100


def test_the_self_test_sees_a_step_that_depends_on_its_company(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = LlamaModel.decode

    def leaking(self: LlamaModel, kv: PagedKV, rows: Sequence[DecodeRow], stop: Stop, dropped: Set[int]) -> np.ndarray:
        return decode(self, kv, rows, stop, dropped) * np.float32(1 + 1e-6 * len(rows))

    monkeypatch.setattr(LlamaModel, "decode", leaking)
    engine, _ = tiny_engine(tiny, fixed=True)
    result = batch_invariance(engine)
    assert not result.identical
    assert result.differences[0].startswith("in company: prompt of ")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("fixed", [False, True], ids=["fast", "fixed"])
def test_a_handed_over_request_goes_on_as_if_it_had_stayed(fixed: bool, temperature: float, tiny: Path) -> None:
    prompt = [int(token) for token in np.random.default_rng(3).integers(0, 256, 70)]
    sampling = Sampling(max_tokens=12, temperature=temperature, top_p=0.95, seed=11, ignore_eos=True)
    whole, _ = tiny_engine(tiny, fixed=fixed)
    pages = [PageId(page) for page in range(6)]
    whole.add(EngineRequest(rid=Rid("a"), prompt=prompt, sampling=sampling, pages=list(pages)))
    wanted = tokens_of(run(whole), "a")

    prefill, source = tiny_engine(tiny, fixed=fixed)
    prefill.add(EngineRequest(rid=Rid("a"), prompt=prompt, sampling=sampling, pages=pages[:5], prefill_only=True))
    last = run(prefill)[-1]
    assert (last.finish, last.ended, last.computed) == ("length", None, 70)
    assert last.token is not None

    decode = prefill.sibling()
    target = attach(decode, 40)
    target[[31, 7, 22, 3, 18]] = source[:5]
    decode.add(
        EngineRequest(
            rid=Rid("a"),
            prompt=prompt,
            sampling=sampling,
            pages=[PageId(page) for page in (31, 7, 22, 3, 18, 1)],
            computed=70,
            prior=(last.token.id,),
        )
    )
    assert [last.token.id, *tokens_of(run(decode), "a")] == wanted


def test_the_self_test_command_reports_and_exits_by_the_result(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDPLANE_HOME", str(tmp_path))
    assert main() == 1
    assert "pdplane model install" in capsys.readouterr().err
    shutil.copytree(tiny, tmp_path / "models" / DEFAULT_MODEL)
    assert main() == 0
    assert f"{DEFAULT_MODEL}: " in capsys.readouterr().out
    calls = itertools.count()
    drifting = lambda self, hidden: np.full((len(hidden), 259), next(calls), np.float32)  # noqa: E731
    monkeypatch.setattr(LlamaModel, "logits", drifting)
    assert main() == 1
    assert "differ" in capsys.readouterr().out
