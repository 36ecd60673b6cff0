from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdplane.engine.sampler import BadLogits, sample
from pdplane.worker.engine import Sampling

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))


def draws(count: int, logits: np.ndarray = LOGITS, seed: int = 5, **how: Any) -> list[int]:
    return [sample(logits, Sampling(max_tokens=9, **how), seed, position).id for position in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert set(draws(20, temperature=0.0)) == {0}


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    assert draws(50) == draws(50)
    assert draws(50) != draws(50, seed=6)
    assert len(set(draws(50))) > 1


def test_draws_follow_the_probabilities() -> None:
    counts = np.bincount(draws(4000), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.15, 0.1], atol=0.03)


def test_a_low_temperature_sharpens() -> None:
    counts = np.bincount(draws(2000, temperature=0.5), minlength=4) / 2000
    wanted = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    np.testing.assert_allclose(counts, wanted / wanted.sum(), atol=0.03)


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draws(500, top_k=2)) == {0, 1}
    assert set(draws(500, top_k=99)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    assert set(draws(500, top_p=0.5)) == {0}
    assert set(draws(500, top_p=0.6)) == {0, 1}
    assert set(draws(500, top_p=0.76)) == {0, 1, 2}


def test_top_p_counts_within_what_top_k_left() -> None:
    assert set(draws(500, top_k=2, top_p=0.7)) == {0, 1}
    assert set(draws(500, top_k=2, top_p=0.6)) == {0}


def test_top_p_over_a_flat_row_needs_more_than_the_first_thousand() -> None:
    flat = np.zeros(5000, np.float32)
    assert max(draws(300, flat, top_p=0.9)) > 2000
    assert max(draws(300, flat, top_p=0.9)) < 4500


def test_banned_tokens_are_never_drawn() -> None:
    assert sample(LOGITS, Sampling(max_tokens=1, temperature=0.0), 0, 0, banned=(0,)).id == 1


def test_logprobs_are_of_the_raw_logits_whatever_the_temperature() -> None:
    how = Sampling(max_tokens=1, temperature=0.2, seed=1, logprobs=True, top_logprobs=2, top_k=1)
    token = sample(LOGITS + 3, how, 1, 0)
    assert token.logprob == pytest.approx(np.log(0.5), abs=1e-6)
    assert [top.token for top in token.top] == [0, 1]
    assert token.top[1].logprob == pytest.approx(np.log(0.25), abs=1e-6)


def test_logprobs_are_left_out_unless_asked_for() -> None:
    token = sample(LOGITS, Sampling(max_tokens=1), 1, 0)
    assert (token.logprob, token.top) == (None, ())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(BadLogits, match="position 7"):
        sample(np.array([0.0, bad], np.float32), Sampling(max_tokens=1), 1, 7)
