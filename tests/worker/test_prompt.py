"""Digests of prompts and the keys of their pages."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.worker.prompt import page_keys, prompt_id

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
