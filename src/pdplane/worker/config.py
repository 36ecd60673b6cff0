"""Everything a worker can be told."""

from __future__ import annotations

import dataclasses
import math

from pdplane.core.ids import Rank, Shape
from pdplane.core.layout import EARLY, PARAMS, PREFILL_COMPLETE, ROOMS
from pdplane.core.node import Limits
from pdplane.core.session import SessionTimes
from pdplane.settings import BadSetting, check_token, flag_of, setting
from pdplane.wire.address import WILDCARDS, is_http_url, is_loopback
from pdplane.wire.registry import FOLLOW_ROOM

from .http.settings import HttpSettings

EMBEDDED = "embedded"
ROLES = ("prefill", "decode", "aggregated")
POLICIES = (EARLY, PREFILL_COMPLETE)
TOTAL_REQUESTS = "total_requests"
TRANSPORTS = ("shm", "shm_push", "tcp")
PUSHED = "shm_push"  # the writer is prefill, when it likes
DIALECTS = (ROOMS, PARAMS)
FAIL, RECOMPUTE = "fail", "recompute"
DEFAULT_LEASE_S = 30.0  # vLLM's
MOST_DP = 8
MAX_PORT = 65535
TOMBSTONE_GRACE_S = 10.0
"""A room is remembered for so much longer than any request of it can live."""
TP_SIZES = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class WorkerConfig(HttpSettings):
    role: str = setting("aggregated", "what this worker does", choices=ROLES)
    dialect: str = setting(
        ROOMS,
        "how a hand-off is made: rooms (SGLang's bootstrap) or params (vLLM's kv_transfer_params); both sides alike",
        choices=DIALECTS,
    )
    host: str = setting("127.0.0.1", "address that HTTP listens on")
    port: int = setting(8100, "port that HTTP listens on; 0 takes any free one")
    model: str = setting(EMBEDDED, "folder of a Llama-family model in Hugging Face's format, or the embedded model")
    served_model_name: str = setting("", "name that clients use; default: the model folder's")
    page_size: int = setting(16, "tokens per page")
    dp: int = setting(1, f"data parallel groups in this process, 1 to {MOST_DP}: each has its engine loop and pools")
    tp: int = setting(1, "tensor parallel ranks of a group, 1, 2 or 4: the KV heads are split over as many pools")
    cp: int = setting(1, "context parallel ranks; workers here run no more than 1")
    pp: int = setting(1, "pipeline parallel ranks; workers here run no more than 1")
    pool_mb: int = setting(1024, "memory of each dp group's pages over all of its tp pools, MiB; touched in time")
    max_running: int = setting(16, "requests in the engine at once")
    max_queue: int = setting(1024, "requests that may wait; one more is answered 429")
    batch_invariant: bool = setting(False, "bit-equal logits whoever shares a step; slower at small batches")
    threads: int = setting(1, "BLAS threads; more than one seldom helps where prefill and decode share cores")
    advertise_host: str = setting("", "address that peers dial for control and data; default: --host")
    control_port: int = setting(0, "prefill: port of control sessions, the next ranks' count up; 0 takes free ones")
    data_port: int = setting(0, "decode: port on which pages come by tcp, the next ranks' count up; 0 takes free ones")
    bootstrap_port: int = setting(8998, "prefill: port of its registry; decode: port asked where a request names none")
    registry: str = setting("", "prefill: URL of a registry that runs apart; default: an embedded one")
    registry_token: str = setting(
        "", "prefill: bearer token that registering at its registry needs; default: --secret", secret=True
    )
    prefill_allow: tuple[str, ...] = setting((), "decode: prefill hosts that requests may name; default: any")
    decode_allocation_policy: str = setting(
        EARLY,
        "when decode reserves pages: early, before prefill computes, or prefill_complete, after it; both sides alike",
        choices=POLICIES,
    )
    load_balance_method: str = setting(
        FOLLOW_ROOM,
        "prefill: which dp group serves a request: the room's number modulo --dp, or the least loaded one",
        choices=(FOLLOW_ROOM, TOTAL_REQUESTS),
    )
    transport: tuple[str, ...] = setting(
        ("shm", "tcp"),
        f"how pages may move, the preferred way first, of {', '.join(TRANSPORTS)}; give it again or as a list a,b",
    )
    checksum: bool = setting(False, "check every page that has moved, end to end (xxh3)")
    prefix_cache: bool = setting(True, "keep the pages of prompts for later ones that begin alike, on either side")
    hold_term_s: float = setting(30.0, "prefill_complete: how long computed pages wait for decode's grant")
    lease_s: float = setting(
        DEFAULT_LEASE_S, "params, prefill: how long computed pages are held for decode, from each renewal anew"
    )
    kv_load_failure_policy: str = setting(
        FAIL,
        "params, decode: fail a request whose pages cannot be read, or recompute its prompt here",
        choices=(FAIL, RECOMPUTE),
    )
    held_pages: int = setting(0, "prefill_complete: most pages computed ahead of a grant; 0: half of the pool")
    reserve_tokens: int = setting(
        512, "decode: growth kept free per request at admission (SGLang: num_reserved_decode_tokens)"
    )
    queue_limit_s: float = setting(60.0, "longest wait for pages or a place, then 429")
    progress_limit_s: float = setting(60.0, "decode: longest time without a sign of work from prefill, then 504")
    drain_limit_s: float = setting(30.0, "wait for proof that pages are quiet, then quarantine")
    beat_s: float = setting(2.0, "interval of beats on a control session")
    silent_s: float = setting(5.0, "silence after which a session counts as lost")
    grace_s: float = setting(2.0, "time in which a lost session may come back")
    shutdown_s: float = setting(
        300.0, "on SIGTERM or a drain: how long running requests may finish before they are cut; a second signal cuts"
    )
    secret: str = setting("", "shared secret of control and data connections", secret=True)
    allow_insecure: bool = setting(False, "leave loopback without --secret: whoever reaches the ports can pair")
    log_level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        for name in ("page_size", "pool_mb", "max_running", "max_queue", "threads", "body_limit_bytes", "dp"):
            self._check(name, least=1)
        for name in ("request_timeout_s", "queue_limit_s", "progress_limit_s", "drain_limit_s", "beat_s", "silent_s"):
            self._check(name, least=0.001)
        for name in ("grace_s", "shutdown_s", "port", "control_port", "data_port", "bootstrap_port"):
            self._check(name, least=0)
        for name in ("hold_term_s", "lease_s"):
            self._check(name, least=0.001)
        for name in ("held_pages", "reserve_tokens"):
            self._check(name, least=0)
        self._check_shape()
        self._check_ports()
        for name in ("secret", "registry_token", "admin_key"):
            check_token(name, getattr(self, name))
        self._check_registry()
        self._check_transports()
        if self.dialect == PARAMS:
            self._check_params()
        else:
            self._check_rooms()
        if self.silent_s <= self.beat_s:
            raise BadSetting(f"--silent-s {self.silent_s:g} is not over --beat-s {self.beat_s:g}: all would be silent")
        if self.role != "aggregated":
            self._check_addresses()

    def _check(self, name: str, *, least: float) -> None:
        value = getattr(self, name)
        if not value >= least:
            raise BadSetting(f"{flag_of(name)} {value:g} is too little; give {least:g} or more")

    def _check_shape(self) -> None:
        if self.dp > MOST_DP:
            raise BadSetting(f"--dp {self.dp} is too much for one process; give 1 to {MOST_DP}, or start more workers")
        if self.tp not in TP_SIZES:
            raise BadSetting(f"--tp {self.tp}: KV heads are split over 1, 2 or 4 pools; give one of these")
        for name, what in (("cp", "context"), ("pp", "pipeline")):
            value = getattr(self, name)
            if value != 1:
                raise BadSetting(
                    f"--{name} {value}: workers here run no {what} parallel ranks; give --{name} 1, or leave it out"
                )

    def _check_ports(self) -> None:
        """Ranks' ports count up from the given one."""
        last = Rank(dp=self.dp - 1, tp=self.tp - 1)
        for name in ("control_port", "data_port"):
            base, highest = getattr(self, name), MAX_PORT + 1 - self.dp * self.tp
            if self.rank_port(base, last) > MAX_PORT:
                raise BadSetting(
                    f"{flag_of(name)} {base}: {self.dp * self.tp} ranks count up from it, beyond port {MAX_PORT}; "
                    f"give {highest} or less"
                )

    def _check_registry(self) -> None:
        if self.registry and not is_http_url(self.registry):
            raise BadSetting(f"--registry {self.registry} is no URL of a registry; give one like http://10.0.0.1:8998")

    def _check_transports(self) -> None:
        unknown = [kind for kind in self._named_transports if kind not in TRANSPORTS]
        if unknown or not self._named_transports:
            raise BadSetting(f"--transport {', '.join(unknown) or 'none'}: give one or more of {', '.join(TRANSPORTS)}")
        if not self.transports:
            raise BadSetting(f"--transport {PUSHED}: it writes from prefill's side; params pulls. Give shm or tcp")

    def _check_rooms(self) -> None:
        """What is told of the params dialect alone."""
        if self.lease_s != DEFAULT_LEASE_S:
            raise BadSetting(f"--lease-s {self.lease_s:g} is of --dialect params: in rooms give --hold-term-s")
        if self.kv_load_failure_policy != FAIL:
            raise BadSetting(
                f"--kv-load-failure-policy {self.kv_load_failure_policy} is of --dialect params: in rooms a lost "
                "hand-off fails, and the router tries again; leave it out"
            )

    def _check_params(self) -> None:
        """What is told of the rooms dialect alone."""
        if self.decode_allocation_policy != EARLY:
            raise BadSetting(
                f"--decode-allocation-policy {self.decode_allocation_policy} is of --dialect rooms: in params prefill "
                "always computes first; leave it out"
            )
        if self.registry:
            raise BadSetting(f"--registry {self.registry} is of --dialect rooms: params needs none; leave it out")
        if math.isinf(self.lease_s):
            raise BadSetting(f"--lease-s {self.lease_s:g}: what nobody reads would be held for ever; give seconds")

    def _check_addresses(self) -> None:
        if self.host in WILDCARDS and not self.advertise_host:
            raise BadSetting(
                f"--host {self.host} listens everywhere: peers need one address to dial, give it with --advertise-host"
            )
        outside = next((host for host in (self.host, self.peer_host) if not is_loopback(host)), None)
        if outside and not (self.secret or self.allow_insecure):
            raise BadSetting(
                f"{outside} is not loopback: whoever reaches it could take part in hand-offs. Give all workers the "
                "same --secret, or say --allow-insecure where the network itself keeps others out"
            )

    @property
    def peer_host(self) -> str:
        return self.advertise_host or self.host

    @property
    def dials_anybody(self) -> bool:
        """A decode that strangers can reach opens sessions, with the secret, to whatever host their requests name."""
        return self.role == "decode" and not self.prefill_allow and not is_loopback(self.host)

    @property
    def shape(self) -> Shape:
        return Shape(dp=self.dp, tp=self.tp)

    def rank_port(self, base: int, rank: Rank) -> int:
        """Where this rank listens, counted up from the first one's; any free port (0) where `base` is 0."""
        return base and base + rank.dp * self.tp + rank.tp

    @property
    def transports(self) -> tuple[str, ...]:
        """By preference, each once. In params nothing is pushed."""
        return tuple(kind for kind in self._named_transports if kind != PUSHED or self.dialect == ROOMS)

    @property
    def _named_transports(self) -> tuple[str, ...]:
        named = (kind.strip() for given in self.transport for kind in given.split(","))
        return tuple(dict.fromkeys(kind for kind in named if kind))

    def limits(self, pages: int) -> Limits:
        return Limits(
            pages=pages,
            page_size=self.page_size,
            max_running=self.max_running,
            max_queue=self.max_queue,
            queue_limit_s=self.queue_limit_s,
            progress_limit_s=self.progress_limit_s,
            drain_limit_s=self.drain_limit_s,
            hold_term_s=self.lease_s if self.dialect == PARAMS else self.hold_term_s,
            recompute=self.kv_load_failure_policy == RECOMPUTE,
            held_pages=self.held_pages,
            prefix_cache=self.prefix_cache,
            reserve_tokens=self.reserve_tokens,
            tombstone_s=self.request_timeout_s + TOMBSTONE_GRACE_S,
            session=SessionTimes(beat_s=self.beat_s, silent_s=self.silent_s, grace_s=self.grace_s),
        )
