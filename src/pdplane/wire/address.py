"""Hosts as URLs and dials want them."""

from __future__ import annotations

import ipaddress

WILDCARDS = frozenset({"0.0.0.0", "::", ""})


def bracketed(host: str) -> str:
    """As a URL writes it: an IPv6 address goes in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def dialable(host: str) -> str:
    """Where to reach what listens on `host`, from the same machine where it is a wildcard."""
    return "127.0.0.1" if host in WILDCARDS else host


def is_loopback(host: str) -> bool:
    """Whether what listens on `host`, or is dialled there, never leaves this machine. A name but localhost may."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(host: str, port: int) -> str:
    """The URL of what listens on `host` and `port`."""
    return f"http://{bracketed(dialable(host))}:{port}"
