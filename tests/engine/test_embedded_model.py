"""The real embedded model, where it is installed."""

from __future__ import annotations

import pytest

from pdplane.core.ids import PageId, Rid
from pdplane.engine import default_model_path
from pdplane.engine.loading import load_numpy
from pdplane.worker.engine import EngineRequest, Sampling

from .tiny import attach, run, tokens_of


@pytest.fixture
def cache_folder() -> None:
    """The user's own cache, not the tests'."""


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "fixed"])
def test_it_knows_the_capital_of_france(batch_invariant: bool) -> None:
    if default_model_path() is None:
        pytest.skip("the embedded model is not installed: 'pdplane model install'")
    engine, tokenizer = load_numpy(None, batch_invariant=batch_invariant)
    attach(engine, 8)
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    sampling = Sampling(max_tokens=24, temperature=0.0)
    engine.add(EngineRequest(rid=Rid("q"), prompt=prompt, sampling=sampling, pages=[PageId(p) for p in range(8)]))
    outputs = run(engine)
    assert tokenizer.decode(tokens_of(outputs, "q")) == "The capital of France is Paris."
    assert outputs[-1].finish == "stop"
