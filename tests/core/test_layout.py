"""Two layouts fit or the refusal names field and both values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdplane.core.layout import LayoutGroup, Stamp, mismatch, pages_for

from .facing import STAMP

OTHER: dict[str, Any] = {
    "model": "n",
    "weights": "v",
    "tokenizer": "u",
    "page_size": 32,
    "page_bytes": 4096,
    "kv_dtype": "f16",
    "groups": (LayoutGroup("kv", 128, (0,), "f32"),),
    "policy": "prefill_complete",
    "protocol": 2,
}


def test_equal_stamps_fit() -> None:
    assert mismatch(STAMP, msgspec.structs.replace(STAMP)) is None


def test_every_field_is_compared() -> None:
    assert set(OTHER) == set(Stamp.__struct_fields__)


@pytest.mark.parametrize("field", OTHER)
def test_a_difference_names_field_and_both_values(field: str) -> None:
    cause = mismatch(STAMP, msgspec.structs.replace(STAMP, **{field: OTHER[field]}))
    assert cause is not None
    assert (cause.code, cause.status, cause.retryable) == ("incompatible", 503, False)
    assert cause.message.startswith(f"{field} differs: prefill has ")
    if field != "groups":
        assert repr(OTHER[field]) in cause.message
        assert repr(getattr(STAMP, field)) in cause.message
    else:
        assert "64 B x 2 layers" in cause.message
        assert "128 B x 1 layers" in cause.message


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10), (161, 11)])
def test_pages_for_tokens(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 16) == pages


def test_bytes_of_a_token() -> None:
    assert STAMP.token_bytes * STAMP.page_size == STAMP.page_bytes
