"""Digests of prompts and the keys of their pages."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.worker.http import intake
from pdplane.worker.prompt import page_keys, prompt_id

from .fleets import member
from .test_http_pairing import PAIR, leg, post

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_a_prompt_is_known_by_its_tokens_as_little_endian_words_and_their_count() -> None:
    known = prompt_id([1, 256])
    assert known.digest == hashlib.blake2b(b"\1\0\0\0\0\1\0\0", digest_size=16).digest()
    assert known.tokens == 2


@given(tokens, st.integers(1, 17))
def test_every_full_page_has_the_digest_of_all_up_to_its_end(prompt: list[int], page_size: int) -> None:
    keys = page_keys(prompt, page_size)
    ends = range(page_size, len(prompt) + 1, page_size)
    assert keys == tuple(prompt_id(prompt[:end]).digest for end in ends)


@given(tokens, tokens, tokens, st.integers(1, 5))
def test_keys_are_equal_as_far_as_the_prompts_are(start: list[int], one: list[int], two: list[int], size: int) -> None:
    first, second = page_keys(start + one, size), page_keys(start + two, size)
    for page, (ours, theirs) in enumerate(zip(first, second, strict=False), start=1):
        assert (ours == theirs) == ((start + one)[: page * size] == (start + two)[: page * size])


def test_a_page_that_is_not_full_has_no_key() -> None:
    assert [len(page_keys(range(n), 16)) for n in (0, 15, 16, 17, 32)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_no_word_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        page_keys([token], 1)


# --- where a request is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_page_size", [0, 4])
async def test_the_samples_of_a_prompt_share_its_id_and_the_keys_that_the_role_wants(key_page_size: int) -> None:
    service = leg("prefill")
    service.key_page_size = key_page_size
    rooms = {**PAIR, "bootstrap_room": [1, 2, 3, 4]}
    assert (await post(service, {"prompt": ["a prompt", "another"], "n": 2} | rooms)).status_code == 200
    for generation in service.batch:
        assert generation.prompt_id == prompt_id(generation.prompt)
        assert generation.page_keys == (page_keys(generation.prompt, 4) if key_page_size else ())
    assert [len(generation.page_keys) for generation in service.batch] == ([2, 2, 1, 1] if key_page_size else [0] * 4)


async def test_a_long_prompt_is_named_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*given)

        return call

    for name in ("prompt_id", "page_keys"):
        monkeypatch.setattr(f"pdplane.worker.http.intake.{name}", noted(getattr(intake, name)))
    service = leg("prefill")
    service.context_len = service.max_prompt_tokens = 100_000
    service.key_page_size = 16
    assert (await post(service, {"prompt": "x" * 50_000} | PAIR)).status_code == 200
    assert len(threads) == 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_only_a_side_that_keeps_pages_wants_their_keys(prefix_cache: bool) -> None:
    for role in ("prefill", "decode", "aggregated"):
        async with member(role, prefix_cache=prefix_cache) as one:
            wanted = one.shell.model.page_size if role != "aggregated" and prefix_cache else 0
            assert one.group.key_page_size == wanted
