"""The forward pass, held against a plain float64 one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdplane.core.ids import PageId, Rid
from pdplane.engine.panels import Linear, padded_rows, panels_of
from pdplane.worker.engine import EngineRequest, Sampling

from .tiny import reference_logits, run, tiny_engine, tokens_of, write_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama untied": {"tie_word_embeddings": False, "seed": 1},
    "llama 3.1 rope": {"rope_scaling": LLAMA3, "seed": 2},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}, "seed": 3},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "biases": QKV, "seed": 4},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "seed": 5},
    "no groups": {"num_key_value_heads": 4, "seed": 6},
}


@pytest.mark.parametrize("fixed", [False, True], ids=["fast", "fixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engines_logits_are_the_models(kind: str, fixed: bool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", **KINDS[kind])
    engine, _ = tiny_engine(folder, fixed=fixed)
    seen: dict[int, np.ndarray] = {}
    engine.on_logits = lambda rid, position, logits: seen.update({position: logits})
    prompt = [int(token) for token in np.random.default_rng(7).integers(0, 256, 75)]
    sampling = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
    pages = [PageId(page) for page in (9, 2, 30, 7, 11, 5)]
    engine.add(EngineRequest(rid=Rid("a"), prompt=prompt, sampling=sampling, pages=pages))
    generated = tokens_of(run(engine), "a")
    wanted = reference_logits(folder, prompt + generated)
    assert sorted(seen) == list(range(75, 81))
    for position, logits in seen.items():
        np.testing.assert_allclose(logits, wanted[position - 1], atol=2e-4)
        assert generated[position - 75] == int(wanted[position - 1].argmax())


@pytest.mark.parametrize("rows", [4, 8, 12, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (40, 259), (2000, 70)])
def test_panels_multiply_like_the_matrix(rows: int, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(rows)
    weight = rng.standard_normal((outputs, inputs), dtype=np.float32)
    bias = rng.standard_normal(outputs, dtype=np.float32)
    x = rng.standard_normal((rows, inputs), dtype=np.float32)
    linear = Linear(panels_of(weight), outputs, bias)
    np.testing.assert_allclose(linear(x), x.astype(np.float64) @ weight.T + bias, atol=1e-3)
    np.testing.assert_array_equal(linear.rows(np.array([0, outputs - 1])), weight[[0, -1]])


def test_rows_are_padded_to_whole_tiles() -> None:
    assert [padded_rows(rows, fixed=False) for rows in (1, 4, 5, 8, 9, 13)] == [4, 4, 8, 8, 12, 16]
    assert [padded_rows(rows, fixed=True) for rows in (1, 4, 5, 8, 9, 13)] == [8, 8, 8, 8, 16, 16]
