"""One worker as the router sees it: where it is, what it said of itself, its load, and why it is out where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdplane.core.layout import Stamp

from .config import Address

if TYPE_CHECKING:
    from .upstream import Leg

AGGREGATED = "aggregated"
UNSEEN = "not looked at yet"


class Limits(msgspec.Struct):
    """From ``/server_info``; 0 is unknown."""

    max_prompt_tokens: int = 0
    context_len: int = 0


class Worker:
    """`reason` "" is in service. `avoid` says why others are preferred for now (busy, or banned): never a refusal."""

    __slots__ = (
        "address",
        "avoid",
        "avoid_until",
        "bootstrap",
        "failures",
        "failures_in_a_row",
        "heads",
        "idle",
        "instance",
        "last_heard",
        "limits",
        "load",
        "mode",
        "model",
        "partners",
        "reason",
        "requests",
        "role",
        "silent",
        "stamp",
        "url",
    )

    def __init__(self, address: Address, role: str) -> None:
        self.address = address
        self.url = address.url
        self.role = role
        self.reason = UNSEEN
        self.instance = ""
        self.model = ""
        self.stamp: Stamp | None = None
        self.limits = Limits()
        self.partners: tuple[Worker, ...] = ()  # of a prefill: the decodes it may pair with
        self.load = 0
        self.requests = 0
        self.failures = 0
        self.failures_in_a_row = 0
        self.avoid = ""
        self.avoid_until = 0.0
        self.last_heard = 0.0
        self.silent = False
        self.idle: list[Leg] = []
        self.heads: dict[str, bytes] = {}
        self.bootstrap = b""
        self.set_bootstrap(address.bootstrap_port)

    def __repr__(self) -> str:
        return f"<{self.role} {self.url}>"

    @property
    def ready(self) -> bool:
        return not self.reason

    def head(self, path: str) -> bytes:
        """The start of a request's head for `path`, made once."""
        head = self.heads.get(path)
        if head is None:
            head = self.heads[path] = (
                f"POST {path} HTTP/1.1\r\nhost: {self.address.netloc}\r\ncontent-type: application/json\r\n"
            ).encode()
        return head

    def set_bootstrap(self, port: int | None) -> None:
        """Where decode finds this prefill's registry, as the JSON fields of a single sample (up to the room)."""
        host = msgspec.json.encode(self.address.host)
        self.bootstrap = b'"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":' % (
            host,
            msgspec.json.encode(port),
        )

    def bootstrap_port(self) -> int | None:
        return msgspec.json.decode(b"{" + self.bootstrap + b"0}", type=_Bootstrap).bootstrap_port

    def took(self, samples: int) -> None:
        self.load += samples
        self.requests += 1

    def let_go(self, samples: int) -> None:
        self.load -= samples
        assert self.load >= 0, f"{self.url}: load below zero"

    def succeeded(self) -> None:
        self.failures_in_a_row = 0

    def drop_idle(self) -> None:
        """Close every idle connection: the process behind them has gone, or is doubted."""
        idle, self.idle = self.idle, []
        for leg in idle:
            leg.discard()

    def describe(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "role": self.role,
            "ready": self.ready,
            "reason": self.reason,
            "avoided": self.avoid,
            "load": self.load,
            "requests": self.requests,
            "failures": self.failures,
            "instance": self.instance,
            "model": self.model,
            "bootstrap_port": self.bootstrap_port() if self.role == "prefill" else None,
            "limits": {"max_prompt_tokens": self.limits.max_prompt_tokens, "context_len": self.limits.context_len},
            "partners": [partner.url for partner in self.partners],
            "idle_connections": len(self.idle),
        }


class _Bootstrap(msgspec.Struct):
    bootstrap_port: int | None = None
