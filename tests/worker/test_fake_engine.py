"""The rule engine sees every wrong byte: what it says of pages can be believed."""

from __future__ import annotations

import pytest

from pdplane.core.ids import PageId, Rid
from pdplane.core.slices import shard_bytes
from pdplane.worker.engine import EngineRequest, ModelSpec, Sampling, StepOutput

from .fake_engine import RuleEngine, spec

A = Rid("a")
THREE_HEADS = spec(heads=3, row_bytes=1536)


def attached(model: ModelSpec, ranks: int, pages: int = 8) -> tuple[RuleEngine, list[bytearray]]:
    engine = RuleEngine(model)
    pools = [bytearray(pages * shard_bytes(model.groups, model.page_size, rank, ranks)) for rank in range(ranks)]
    engine.attach([memoryview(pool) if pool else None for pool in pools], pages)
    return engine, pools


def ask(engine: RuleEngine) -> None:
    sampling = Sampling(max_tokens=9, temperature=0.0, ignore_eos=True)
    engine.add(
        EngineRequest(rid=A, prompt=list(b"abcdefg"), sampling=sampling, pages=[PageId(p) for p in (5, 2, 7, 0)])
    )


def run(engine: RuleEngine) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while engine.busy():
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", [spec(), THREE_HEADS], ids=["four heads", "three heads"])
def test_tokens_do_not_depend_on_the_ranks(model: ModelSpec, ranks: int) -> None:
    texts = []
    for count in (1, ranks):
        engine, pools = attached(model, count)
        ask(engine)
        outputs = run(engine)
        assert outputs[-1].finish == "length"
        texts.append([output.token.id for output in outputs if output.token])
        assert all(any(pool) for pool in pools if pool)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("at", [0, 127, 128, 255])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_wrong_byte_on_any_rank_ends_the_request_and_names_it(rank: int, at: int) -> None:
    engine, pools = attached(spec(), 2)
    ask(engine)
    engine.step()
    page_bytes = shard_bytes(engine.model.groups, engine.model.page_size, rank, 2)
    pools[rank][2 * page_bytes + at] ^= 1  # the second page of the request, token 4, K of both heads
    [output] = engine.step()
    assert (output.finish, output.error) == ("error", f"KV of position 4 on rank {rank} is not that of this request")


def test_two_heads_that_were_exchanged_are_seen() -> None:
    engine, (pool,) = attached(spec(), 1)
    ask(engine)
    engine.step()
    start = 5 * engine.model.page_bytes
    pool[start : start + 128], pool[start + 128 : start + 256] = (
        pool[start + 128 : start + 256],
        pool[start : start + 128],
    )
    assert [output.error for output in engine.step()] == ["KV of position 0 on rank 0 is not that of this request"]
