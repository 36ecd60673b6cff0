"""KV heads split over the pools of tensor parallel ranks: the bytes lie elsewhere, and nothing else changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pdplane.core.ids import PageId, Rid
from pdplane.core.slices import heads_of, shard_bytes
from pdplane.engine.numpy_engine import NumpyEngine, attach_pools
from pdplane.worker.engine import EngineRequest, Sampling

from .tiny import bare_engine, run, tokens_of, write_checkpoint

PAGE = 16
PAGES = 24
HEADS = {3: {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, 4: {"num_key_value_heads": 4}}

Seen = dict[tuple[str, int], np.ndarray]


@pytest.fixture(scope="module", params=HEADS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("heads") / "model", seed=request.param, **HEADS[request.param])


def random_prompt(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(0, 256, length)]


def three_at_once(engine: NumpyEngine) -> Seen:
    """The logits of every token of three requests that share steps; page numbers in no order."""
    seen: Seen = {}
    engine.on_logits = lambda rid, position, logits: seen.update({(rid, position): logits})
    free = [PageId(int(page)) for page in np.random.default_rng(1).permutation(PAGES)]
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    for name, length in (("a", 5), ("b", 70), ("c", 133)):
        pages = [free.pop() for _ in range(-(-(length + 8) // PAGE))]
        engine.add(EngineRequest(rid=Rid(name), prompt=random_prompt(length), sampling=sampling, pages=pages))
    run(engine)
    return seen


def rows(engine: NumpyEngine, pools: list[np.ndarray], ranks: int) -> np.ndarray:
    """All KV as [pages, layers, 2, page_size, kv_heads, head_dim], the ranks' heads put side by side."""
    layers, heads = len(engine.model.groups[0].layers), engine.model.groups[0].heads
    held = [len(heads_of(heads, rank, ranks)) for rank in range(ranks)]
    parts = [
        pool.view(np.float32).reshape(PAGES, layers, 2, PAGE, count, -1)
        for pool, count in zip(pools, held, strict=True)
        if count
    ]
    return np.concatenate(parts, axis=4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_and_heads_are_bit_equal_however_many_pools_hold_them(folder: Path, ranks: int) -> None:
    one, many = bare_engine(folder, fixed=True), bare_engine(folder, fixed=True)
    one_pool, many_pools = attach_pools(one, PAGES), attach_pools(many, PAGES, ranks)
    wanted, found = three_at_once(one), three_at_once(many)
    assert len(wanted) == 24
    assert sorted(found) == sorted(wanted)
    for key, logits in wanted.items():
        assert np.array_equal(found[key], logits), key
    assert np.array_equal(rows(many, many_pools, ranks), rows(one, one_pool, 1))
    assert rows(one, one_pool, 1).any()


@pytest.mark.parametrize("ranks", [2, 4])
def test_text_is_equal_in_the_fast_mode_too(folder: Path, ranks: int) -> None:
    one, many = bare_engine(folder), bare_engine(folder)
    attach_pools(one, PAGES)
    attach_pools(many, PAGES, ranks)
    wanted, found = three_at_once(one), three_at_once(many)
    assert all(np.array_equal(found[key], logits) for key, logits in wanted.items())


def test_a_rank_without_heads_has_pages_of_no_bytes_and_needs_no_pool(tmp_path: Path) -> None:
    engine = bare_engine(write_checkpoint(tmp_path / "model", **HEADS[3]))
    pools = attach_pools(engine, PAGES, 4)
    assert [pool.shape[1] > 0 for pool in pools] == [False, True, True, True]
    assert sum(pool.shape[1] for pool in pools) == engine.model.page_bytes


def test_the_layout_says_how_a_page_is_made_of_heads(folder: Path) -> None:
    model = bare_engine(folder).model
    (group,) = model.groups
    assert (group.parts, group.dtype, len(group.layers)) == (2, "float32", 2)
    assert shard_bytes(model.groups, PAGE, 0, 1) == model.page_bytes == PAGE * group.row_bytes * len(group.layers)


def test_siblings_run_on_threads_of_their_own_and_do_not_disturb_each_other(folder: Path) -> None:
    first = bare_engine(folder, fixed=True)
    engines = [first.sibling() for _ in range(4)]
    for number, engine in enumerate([first, *engines]):
        attach_pools(engine, PAGES, 1 + number % 2)
    wanted = three_at_once(first)
    with ThreadPoolExecutor(max_workers=4) as threads:
        results = list(threads.map(three_at_once, engines))
    for found in results:
        assert all(np.array_equal(found[key], logits) for key, logits in wanted.items())


def test_a_hand_off_between_unequal_ranks_goes_on_as_if_it_had_stayed(folder: Path) -> None:
    prompt = random_prompt(70)
    sampling = Sampling(max_tokens=9, temperature=0.0, ignore_eos=True)
    prefill, decode = bare_engine(folder, fixed=True), bare_engine(folder, fixed=True)
    source, target = attach_pools(prefill, PAGES, 2), attach_pools(decode, PAGES, 4)
    pages = [PageId(page) for page in range(5)]
    prefill.add(EngineRequest(rid=Rid("whole"), prompt=prompt, sampling=sampling, pages=pages))
    wanted = tokens_of(run(prefill), "whole")
    held = rows(prefill, source, 2)
    heads = prefill.model.groups[0].heads
    for rank, pool in enumerate(target):
        mine = heads_of(heads, rank, 4)
        if mine:
            typed = pool.view(np.float32).reshape(PAGES, 2, 2, PAGE, len(mine), -1)
            typed[[9, 3, 20, 0, 11]] = held[:5, ..., mine.start : mine.stop, :]
    there = [PageId(page) for page in (9, 3, 20, 0, 11)]
    decode.add(
        EngineRequest(rid=Rid("rest"), prompt=prompt, sampling=sampling, pages=there, computed=70, prior=(wanted[0],))
    )
    assert tokens_of(run(decode), "rest") == wanted[1:]
