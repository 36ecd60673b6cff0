"""Hosts in URLs."""

from __future__ import annotations

import pytest

from pdplane.wire.address import bracketed, dialable, is_loopback, url_of


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


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "::ffff:127.0.0.1", "localhost"])
def test_loopback_never_leaves_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "", "node-7", "::ffff:10.0.0.1", "fe80::1%eth0"])
def test_all_else_may_leave_it(host: str) -> None:
    assert not is_loopback(host)
