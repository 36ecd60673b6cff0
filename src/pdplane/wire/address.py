"""Hosts as URLs and dials want them."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

WILDCARDS = frozenset({"0.0.0.0", "::", ""})


def bracketed(host: str) -> str:
    """As a URL writes it: an IPv6 address goes in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def dialable(host: str) -> str:
    """Where to reach what listens on `host`, from the same machine where it is a wildcard."""
    return "127.0.0.1" if host in WILDCARDS else host


def is_loopback(host: str) -> bool:
    """Whether what listens on `host`, is dialled there or comes from there never leaves this machine. A name but
    localhost may. An IPv4 address may come mapped into IPv6."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_http_url(text: str) -> bool:
    """Whether it is http or https, with a host and, if any, a port that is one."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def url_of(host: str, port: int) -> str:
    """The URL of what listens on `host` and `port`."""
    return f"http://{bracketed(dialable(host))}:{port}"
