"""One worker as the router sees it: where it is, what it said of itself, its load, and why it is out where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from pdplane.core.ids import Shape
from pdplane.core.layout import Stamp

from .ban import Ban
from .config import Address, RouterConfig
from .ranks import RankLoads

if TYPE_CHECKING:
    from .upstream import Leg

UNSEEN = "not looked at yet"
ROOMS, PARAMS = "rooms", "params"


class Limits(msgspec.Struct):
    """From ``/server_info``; 0 is unknown."""

    max_prompt_tokens: int = 0
    context_len: int = 0


class Worker:
    """`reason` "" is in service. `avoid` says why others are preferred for now (busy, or banned): never a refusal.

    `dialect`: how pages are handed over, rooms or params. `doubt` asks for a look at it at once; whoever looks sets it.
    `pins_ranks`: its dispatch does not follow the room, so that a leg must name its rank.
    """

    __slots__ = (
        "address",
        "aliases",
        "avoid",
        "ban",
        "bootstrap",
        "busy_until",
        "dialect",
        "doubt",
        "draining",
        "failures",
        "heads",
        "idle",
        "instance",
        "last_heard",
        "limits",
        "load",
        "model",
        "no_abort_call",
        "partners",
        "pins_ranks",
        "policy",
        "ranks",
        "reason",
        "requests",
        "role",
        "shape",
        "silent",
        "stamp",
        "transports",
        "url",
    )

    def __init__(self, address: Address, role: str) -> None:
        self.address = address
        self.url = address.url
        self.role = role
        self.reason = UNSEEN
        self.draining = ""  # why it takes nothing new
        self.instance = ""
        self.dialect = ROOMS
        self.no_abort_call = False  # it was asked, and has none
        self.model = ""
        self.aliases: tuple[str, ...] = ()  # other names that requests may give
        self.stamp: Stamp | None = None
        self.shape = Shape()
        self.policy = ""
        self.transports: object = None  # as it says it
        self.limits = Limits()
        self.partners: tuple[Worker, ...] = ()  # of a prefill: the decodes it may pair with
        self.load = 0
        self.ranks: RankLoads | None = None  # of a prefill with several
        self.pins_ranks = False
        self.requests = 0
        self.failures = 0
        self.ban = Ban()
        self.busy_until = 0.0
        self.avoid = ""
        self.last_heard = 0.0
        self.silent = False
        self.doubt: Callable[[], None] = _nobody_looks
        self.idle: list[Leg] = []
        self.heads: dict[str, bytes] = {}
        self.bootstrap = b""
        self.set_bootstrap(address.bootstrap_port)

    def __repr__(self) -> str:
        return f"<{self.role} {self.url}>"

    @property
    def ready(self) -> bool:
        return not self.reason

    @property
    def names(self) -> tuple[str, ...]:
        """Of the models that it serves; none are known where it has told none."""
        return (self.model, *self.aliases) if self.model else ()

    def head(self, path: str) -> bytes:
        """The start of a request's head for `path`, made once."""
        head = self.heads.get(path)
        if head is None:
            head = self.heads[path] = (
                f"POST {path} HTTP/1.1\r\nhost: {self.address.netloc}\r\ncontent-type: application/json\r\n"
            ).encode()
        return head

    def set_bootstrap(self, port: int | None) -> None:
        """Where decode finds this prefill's registry, and its policy where it says one, as the JSON fields of a single
        sample (up to the room)."""
        policy = b'"decode_allocation_policy":%b,' % msgspec.json.encode(self.policy) if self.policy else b""
        self.bootstrap = b'%b"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":' % (
            policy,
            msgspec.json.encode(self.address.host),
            msgspec.json.encode(port),
        )

    def bootstrap_port(self) -> int | None:
        return msgspec.json.decode(b"{" + self.bootstrap + b"0}", type=_Bootstrap).bootstrap_port

    def set_shape(self, shape: Shape, *, pins_ranks: bool) -> None:
        """Counts of another size begin at zero; what runs gives back to those that it took from."""
        many = self.role == "prefill" and shape.dp > 1
        if not many:
            self.ranks = None
        elif self.ranks is None or len(self.ranks.loads) != shape.dp:
            self.ranks = RankLoads(shape.dp)
        self.shape, self.pins_ranks = shape, many and pins_ranks

    # --- load -------------------------------------------------------------------------------------------------

    def took(self, samples: int) -> None:
        self.load += samples
        self.requests += 1
        if self.ban.on_trial:
            self.ban.testing = True
            self.avoid = self._avoid()

    def let_go(self, samples: int) -> None:
        self.load -= samples
        assert self.load >= 0, f"{self.url}: load below zero"
        if self.ban.on_trial:  # the test ended without a verdict on the worker
            self.ban.testing = False
            self.avoid = self._avoid()

    # --- failures, bans, busyness -------------------------------------------------------------------------------

    def failed(self, opened: float, why: str, now: float, config: RouterConfig) -> None:
        """A leg opened at `opened` failed by this worker's fault."""
        self.failures += 1
        self.ban.failed(opened, why, now, config)
        self.avoid = self._avoid()

    def succeeded(self, opened: float) -> None:
        if self.ban.failures:
            self.ban.succeeded(opened)
            self.avoid = self._avoid()

    def busy(self, until: float) -> None:
        self.busy_until = max(self.busy_until, until)
        self.avoid = self._avoid()

    def pass_time(self, now: float) -> None:
        """Busyness ends and bans expire."""
        if self.busy_until and self.busy_until <= now:
            self.busy_until = 0.0
        self.ban.expire(now)
        self.avoid = self._avoid()

    def _avoid(self) -> str:
        return self.ban.avoid or ("busy" if self.busy_until else "")

    def born_again(self) -> None:
        """Another process answers: nothing that is cached of the old one holds."""
        self.drop_idle()
        self.ban.lift()
        self.busy_until = 0.0
        self.avoid = ""
        self.no_abort_call = False

    def drop_idle(self) -> None:
        """Close every idle connection: the process behind them has gone, or is doubted."""
        idle, self.idle = self.idle, []
        for leg in idle:
            leg.discard()

    # --- for people -----------------------------------------------------------------------------------------------

    def describe(self, now: float) -> dict[str, Any]:
        return {
            "url": self.url,
            "role": self.role,
            "ready": self.ready,
            "reason": self.reason,
            "draining": self.draining,
            "avoided": self.avoid,
            "ban": self.ban.describe(now),
            "load": self.load,
            "rank_load": list(self.ranks.loads) if self.ranks is not None else None,
            "requests": self.requests,
            "failures": self.failures,
            "instance": self.instance,
            "dialect": self.dialect,
            "model": self.model,
            "aliases": list(self.aliases),
            "shape": msgspec.structs.asdict(self.shape),
            "decode_allocation_policy": self.policy,
            "transports": self.transports,
            "bootstrap_port": self.bootstrap_port() if self.role == "prefill" else None,
            "limits": {"max_prompt_tokens": self.limits.max_prompt_tokens, "context_len": self.limits.context_len},
            "partners": [partner.url for partner in self.partners],
            "idle_connections": len(self.idle),
        }


def _nobody_looks() -> None:
    """Before a watch is there."""


class _Bootstrap(msgspec.Struct):
    bootstrap_port: int | None = None
