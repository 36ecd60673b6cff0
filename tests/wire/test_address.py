"""Hosts in URLs."""

from __future__ import annotations

import pytest

from pdplane.wire.address import bracketed, dialable, url_of


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.1", "http://10.0.0.1:80"),
        ("node-1", "http://node-1:80"),
        ("::1", "http://[::1]:80"),
        ("[::1]", "http://[::1]:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://127.0.0.1:80"),
    ],
)
def test_a_host_in_a_url(host: str, url: str) -> None:
    assert url_of(host, 80) == url


def test_only_a_wildcard_is_dialled_elsewhere() -> None:
    assert dialable("0.0.0.0") == "127.0.0.1"
    assert dialable("10.0.0.1") == "10.0.0.1"
    assert bracketed("10.0.0.1") == "10.0.0.1"
