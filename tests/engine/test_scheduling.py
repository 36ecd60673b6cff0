"""What the engine does in which step, and how a request ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdplane.core.ids import PageId, Rid
from pdplane.engine.model import LlamaModel
from pdplane.engine.numpy_engine import NumpyEngine, pool_bytes
from pdplane.worker.engine import EngineRequest, Sampling

from .tiny import EOS, VOCAB, run, tiny_engine, tokens_of


@pytest.fixture
def engine(tiny: Path) -> NumpyEngine:
    return tiny_engine(tiny)[0]


def ask(rid: str, length: int, pages: range = range(8), **more: Any) -> EngineRequest:
    prompt = [int(token) for token in np.random.default_rng(length).integers(0, 256, length)]
    sampling = Sampling(**({"max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | more.pop("sampling", {})))
    return EngineRequest(
        rid=Rid(rid), prompt=more.pop("prompt", prompt), sampling=sampling, pages=[PageId(p) for p in pages], **more
    )


def test_a_long_prompt_is_computed_in_chunks_of_64(engine: NumpyEngine) -> None:
    engine.add(ask("a", 100))
    (first,) = engine.step()
    assert (first.computed, first.token, first.finish) == (64, None, None)
    (second,) = engine.step()
    assert second.computed == 100
    assert second.token is not None


def test_chunks_and_decode_steps_alternate(engine: NumpyEngine) -> None:
    engine.add(ask("runs", 10, range(4), sampling={"max_tokens": 20}))
    engine.step()
    engine.add(ask("waits", 120, range(4, 12)))
    assert [[output.rid for output in engine.step()] for _ in range(4)] == [["runs"], ["waits"], ["runs"], ["waits"]]


def test_the_oldest_prompt_goes_first(engine: NumpyEngine) -> None:
    engine.add(ask("old", 100, range(8)))
    engine.add(ask("new", 10, range(8, 16)))
    assert [engine.step()[0].rid for _ in range(2)] == ["old", "old"]


def test_running_requests_share_a_step(engine: NumpyEngine) -> None:
    for number in range(3):
        engine.add(ask(f"r{number}", 10 + number, range(4 * number, 4 * number + 4), sampling={"max_tokens": 9}))
    outputs: list[Any] = []
    while len(outputs) < 3:
        outputs = engine.step()
    assert {output.rid for output in outputs} == {"r0", "r1", "r2"}


def test_a_request_without_a_page_for_its_next_token_waits_for_one(engine: NumpyEngine) -> None:
    engine.add(ask("a", 16, range(1)))
    (output,) = engine.step()
    assert output.token is not None
    assert not engine.busy()
    assert engine.step() == []
    engine.extend(Rid("a"), [PageId(9)])
    engine.extend(Rid("stranger"), [PageId(10)])
    assert engine.busy()
    assert engine.step()[0].computed == 17


def test_max_tokens_ends_with_length(engine: NumpyEngine) -> None:
    engine.add(ask("a", 10))
    outputs = run(engine)
    assert len(tokens_of(outputs, "a")) == 4
    assert [output.finish for output in outputs] == [None, None, None, "length"]


def test_a_stop_token_ends_with_stop_and_is_reported(engine: NumpyEngine) -> None:
    engine.add(ask("free", 10))
    second = tokens_of(run(engine), "free")[1]
    engine.add(ask("a", 10, sampling={"stop_token_ids": (second,)}))
    outputs = run(engine)
    assert tokens_of(outputs, "a")[-1] == second
    assert outputs[-1].finish == "stop"


def test_min_tokens_keeps_stop_tokens_out_of_reach(engine: NumpyEngine) -> None:
    engine.add(ask("free", 10))
    first = tokens_of(run(engine), "free")[0]
    engine.add(ask("a", 10, sampling={"stop_token_ids": (first,), "min_tokens": 3, "max_tokens": 3}))
    outputs = run(engine)
    assert first not in tokens_of(outputs, "a")
    assert outputs[-1].finish == "length"


def test_the_models_eos_stops_unless_it_is_ignored(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def always_eos(self: LlamaModel, hidden: np.ndarray) -> np.ndarray:
        logits = np.zeros((len(hidden), VOCAB), np.float32)
        logits[:, EOS] = 9.0
        return logits

    monkeypatch.setattr(LlamaModel, "logits", always_eos)
    engine, _ = tiny_engine(tiny)
    engine.add(ask("a", 10, sampling={"ignore_eos": False}))
    assert [(output.token.id, output.finish) for output in run(engine) if output.token] == [(EOS, "stop")]
    engine.add(ask("a", 10))
    assert tokens_of(run(engine), "a") == [EOS] * 4


def test_the_context_length_ends_with_length(engine: NumpyEngine) -> None:
    engine.add(ask("a", 254, range(16), sampling={"max_tokens": 50}))
    outputs = run(engine)
    assert len(tokens_of(outputs, "a")) == 2
    assert outputs[-1].finish == "length"


def test_prefill_only_samples_one_token_and_tells_the_real_end(engine: NumpyEngine) -> None:
    engine.add(ask("goes on", 10, prefill_only=True))
    engine.add(ask("ends", 10, range(8, 16), prefill_only=True, sampling={"max_tokens": 1}))
    outputs = run(engine)
    assert [(o.rid, o.finish, o.ended) for o in outputs] == [("goes on", "length", None), ("ends", "length", "length")]


def test_prior_tokens_count(engine: NumpyEngine) -> None:
    engine.add(ask("whole", 10))
    tokens = tokens_of(run(engine), "whole")
    engine.add(ask("rest", 10, computed=10, prior=tuple(tokens[:1])))
    assert tokens_of(run(engine), "rest") == tokens[1:]
    engine.add(ask("over", 10, computed=10, prior=tuple(tokens)))
    (output,) = run(engine)
    assert (output.finish, output.token) == ("length", None)


def test_a_wholly_cached_prompt_has_its_last_token_computed_again(engine: NumpyEngine) -> None:
    engine.add(ask("a", 70))
    wanted = tokens_of(run(engine), "a")
    engine.add(ask("b", 70, computed=70))
    assert tokens_of(run(engine), "b") == wanted


def test_an_abort_between_two_steps_is_over_at_once_and_says_no_more(engine: NumpyEngine) -> None:
    engine.add(ask("a", 100, range(8)))
    engine.add(ask("b", 10, range(8, 16)))
    engine.step()
    assert engine.abort(Rid("a"))
    assert not engine.abort(Rid("stranger"))
    outputs = run(engine)
    assert not [output for output in outputs if output.rid == "a"]
    assert len(tokens_of(outputs, "b")) == 4
    assert not engine.abort(Rid("a"))
    assert not engine.busy()


def test_an_abort_during_the_step_of_another_request_does_not_wait_for_it(
    engine: NumpyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add(ask("a", 64, range(8)))
    engine.add(ask("b", 64, range(8, 16)))
    feed_forward = LlamaModel._mlp
    dropped = []

    def aborting(self: LlamaModel, layer: Any, x: np.ndarray) -> np.ndarray:
        dropped.append(engine.abort(Rid("b")))
        return feed_forward(self, layer, x)

    monkeypatch.setattr(LlamaModel, "_mlp", aborting)
    assert {output.rid for output in engine.step()} == {"a"}
    assert dropped[0] is True
    assert not any(dropped[1:])
    assert not [output for output in run(engine) if output.rid == "b"]


def test_what_was_aborted_in_a_step_that_failed_is_said_by_the_next(
    engine: NumpyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add(ask("a", 64))

    def failing(self: LlamaModel, layer: Any, x: np.ndarray) -> np.ndarray:
        engine.abort(Rid("a"))
        raise MemoryError

    monkeypatch.setattr(LlamaModel, "_mlp", failing)
    with pytest.raises(MemoryError):
        engine.step()
    assert [(output.rid, output.finish) for output in run(engine)] == [("a", "abort")]
    assert not engine.busy()


def test_an_abort_cuts_a_lone_step_between_two_layers(engine: NumpyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[Any] = []
    feed_forward = LlamaModel._mlp

    def abort_in_first_layer(self: LlamaModel, layer: Any, x: np.ndarray) -> np.ndarray:
        layers.append(layer)
        engine.abort(Rid("a"))
        return feed_forward(self, layer, x)

    monkeypatch.setattr(LlamaModel, "_mlp", abort_in_first_layer)
    engine.add(ask("a", 64))
    assert [(output.finish, output.computed) for output in engine.step()] == [("abort", 0)]
    assert len(layers) == 1
    assert not engine.busy()


def test_an_abort_does_not_cut_a_shared_step(engine: NumpyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, rid in enumerate(("a", "b")):
        engine.add(ask(rid, 10, range(8 * number, 8 * number + 8), sampling={"max_tokens": 9}))
    while len(engine._running) < 2:
        engine.step()
    feed_forward = LlamaModel._mlp

    def aborting(self: LlamaModel, layer: Any, x: np.ndarray) -> np.ndarray:
        engine.abort(Rid("a"))
        return feed_forward(self, layer, x)

    monkeypatch.setattr(LlamaModel, "_mlp", aborting)
    outputs = run(engine)
    assert [output.finish for output in outputs if output.rid == "a"][-1] == "abort"
    assert len(tokens_of(outputs, "b")) >= 6


def test_a_shared_step_lets_go_of_an_aborted_row_between_two_layers(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may have another owner from then on: nothing of it is written any more, and the others go on."""
    engine, pool = tiny_engine(tiny, fixed=True)
    engine.add(ask("alone", 10, range(8, 16), sampling={"max_tokens": 9}))
    alone = tokens_of(run(engine), "alone")
    for number, rid in enumerate(("a", "b")):
        engine.add(ask(rid, 10, range(8 * number, 8 * number + 8), sampling={"max_tokens": 9}))
    outputs = []
    while len(engine._running) < 2:
        outputs += engine.step()
    pages = pool[:8]
    dropped: list[Rid] = []

    def free(rid: Rid) -> None:
        dropped.append(rid)
        pages.fill(7)

    engine.on_dropped = free
    feed_forward = LlamaModel._mlp

    def aborting(self: LlamaModel, layer: Any, x: np.ndarray) -> np.ndarray:
        engine.abort(Rid("a"))
        return feed_forward(self, layer, x)

    monkeypatch.setattr(LlamaModel, "_mlp", aborting)
    shared = engine.step()
    assert [output.rid for output in shared] == ["b"]
    assert dropped == ["a"]
    assert tokens_of(outputs + shared + run(engine), "b") == alone
    assert np.all(pages == 7)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1] * 257, "pages": range(17)}, "the prompt has 257 tokens, the model's context is 256"),
        ({"prompt": [1, 300]}, "token id 300 is outside the vocabulary of 259"),
        ({"prompt": [-1]}, "token id -1 is outside"),
        ({"pages": range(31, 33)}, "page 32 is outside the pool of 32 pages"),
        ({"pages": range(0)}, "0 pages of 16 cannot hold a prompt of 10 tokens"),
        ({"computed": 3, "prior": (5,)}, "prior tokens need the prompt's KV, but 3 of 10 tokens have theirs"),
    ],
)
def test_what_cannot_run_finishes_with_an_error(engine: NumpyEngine, wrong: dict[str, Any], message: str) -> None:
    engine.add(ask("good", 10, range(16, 24)))
    engine.add(ask("bad", 10, **wrong))
    outputs = run(engine)
    (error,) = [output for output in outputs if output.rid == "bad"]
    assert error.finish == "error"
    assert message in error.error
    assert len(tokens_of(outputs, "good")) == 4


def test_damaged_kv_ends_its_own_request_only(tiny: Path) -> None:
    engine, pool = tiny_engine(tiny)
    pool.view(np.float32)[0] = np.nan
    engine.add(ask("bad", 10, range(4), computed=10, prior=(5,)))
    engine.add(ask("good", 10, range(4, 8), computed=10, prior=(5,)))
    outputs = run(engine)
    assert [(output.finish, "not finite" in output.error) for output in outputs if output.rid == "bad"] == [
        ("error", True)
    ]
    assert len(tokens_of(outputs, "good")) == 3


def test_a_live_rid_is_not_taken_twice(engine: NumpyEngine) -> None:
    engine.add(ask("a", 10))
    with pytest.raises(ValueError, match="request a is already in the engine"):
        engine.add(ask("a", 10))


def test_a_pool_that_is_too_small_or_read_only_is_refused(engine: NumpyEngine) -> None:
    pool = pool_bytes(engine.model, 2)
    with pytest.raises(ValueError, match=r"rank 0 of 1 has .* 3 pages need"):
        engine.attach([pool.data], 3)
    with pytest.raises(ValueError, match="read-only: True"):
        engine.attach([pool.data.toreadonly()], 2)


def test_a_rank_with_heads_needs_a_pool(engine: NumpyEngine) -> None:
    half = pool_bytes(engine.model, 2, 0, 2)
    with pytest.raises(ValueError, match="rank 1 of 2 is missing, and the rank holds KV heads 1 to 1"):
        engine.attach([half.data, None], 2)
    with pytest.raises(ValueError, match="0 pools hold no KV head"):
        engine.attach([], 2)


def test_what_ended_in_a_step_that_failed_later_is_said_by_the_next(engine: NumpyEngine) -> None:
    """Or its pages would never be released: the engine has forgotten it."""
    engine.add(ask("ends", 10, range(4), sampling={"max_tokens": 3}))
    engine.add(ask("fails", 11, range(4, 8), sampling={"max_tokens": 9}))
    for _ in range(3):
        engine.step()

    def failing(rid: Rid, position: int, logits: Any) -> None:
        if rid == "fails":
            raise MemoryError

    engine.on_logits = failing
    with pytest.raises(MemoryError):
        engine.step()
    assert engine.abort(Rid("fails"))
    assert [(output.rid, output.finish) for output in engine.step()] == [("ends", "length")]
    assert not engine.busy()
