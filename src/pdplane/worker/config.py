"""Everything a worker can be told."""

from __future__ import annotations

import dataclasses

from pdplane.core.node import Limits
from pdplane.core.session import SessionTimes
from pdplane.settings import BadSetting, flag_of, setting
from pdplane.wire.address import WILDCARDS

from .http.settings import HttpSettings

EMBEDDED = "embedded"
ROLES = ("prefill", "decode", "aggregated")


@dataclasses.dataclass(frozen=True)
class WorkerConfig(HttpSettings):
    role: str = setting("aggregated", "what this worker does", choices=ROLES)
    host: str = setting("127.0.0.1", "address that HTTP listens on")
    port: int = setting(8100, "port that HTTP listens on; 0 takes any free one")
    model: str = setting(EMBEDDED, "folder of a Llama-family model in Hugging Face's format, or the embedded model")
    served_model_name: str = setting("", "name that clients use; default: the model folder's")
    page_size: int = setting(16, "tokens per page")
    pool_mb: int = setting(1024, "memory of the page pool, MiB; under load all of it is touched in time")
    max_running: int = setting(16, "requests in the engine at once")
    max_queue: int = setting(1024, "requests that may wait; one more is answered 429")
    batch_invariant: bool = setting(False, "bit-equal logits whoever shares a step; slower at small batches")
    threads: int = setting(1, "BLAS threads; more than one seldom helps where prefill and decode share cores")
    advertise_host: str = setting("", "address that peers dial for control and data; default: --host")
    control_port: int = setting(0, "prefill: port of control sessions; 0 takes any free one")
    data_port: int = setting(0, "decode: port on which pages arrive; 0 takes any free one")
    bootstrap_port: int = setting(8998, "prefill: port of its registry; decode: port asked where a request names none")
    registry: str = setting("", "prefill: URL of a registry that runs apart; default: an embedded one")
    prefill_allow: tuple[str, ...] = setting((), "decode: prefill hosts that requests may name; default: any")
    queue_limit_s: float = setting(60.0, "longest wait for pages or a place, then 429")
    progress_limit_s: float = setting(60.0, "decode: longest time without a sign of work from prefill, then 504")
    drain_limit_s: float = setting(30.0, "wait for proof that pages are quiet, then quarantine")
    beat_s: float = setting(2.0, "interval of beats on a control session")
    silent_s: float = setting(5.0, "silence after which a session counts as lost")
    grace_s: float = setting(2.0, "time in which a lost session may come back")
    shutdown_s: float = setting(10.0, "on SIGTERM: how long running requests may finish")
    secret: str = setting("", "shared secret of control sessions", secret=True)
    log_level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        for name in ("page_size", "pool_mb", "max_running", "max_queue", "threads", "body_limit_bytes"):
            self._check(name, least=1)
        for name in ("request_timeout_s", "queue_limit_s", "progress_limit_s", "drain_limit_s", "beat_s", "silent_s"):
            self._check(name, least=0.001)
        for name in ("grace_s", "shutdown_s", "port", "control_port", "data_port", "bootstrap_port"):
            self._check(name, least=0)
        if self.host in WILDCARDS and self.role != "aggregated" and not self.advertise_host:
            raise BadSetting(
                f"--host {self.host} listens everywhere: peers need one address to dial, give it with --advertise-host"
            )
        if self.silent_s <= self.beat_s:
            raise BadSetting(f"--silent-s {self.silent_s:g} is not over --beat-s {self.beat_s:g}: all would be silent")

    def _check(self, name: str, *, least: float) -> None:
        value = getattr(self, name)
        if not value >= least:
            raise BadSetting(f"{flag_of(name)} {value:g} is too little; give {least:g} or more")

    @property
    def peer_host(self) -> str:
        return self.advertise_host or self.host

    def limits(self, pages: int) -> Limits:
        return Limits(
            pages=pages,
            page_size=self.page_size,
            max_running=self.max_running,
            max_queue=self.max_queue,
            queue_limit_s=self.queue_limit_s,
            progress_limit_s=self.progress_limit_s,
            drain_limit_s=self.drain_limit_s,
            tombstone_s=self.request_timeout_s + 10,
            session=SessionTimes(beat_s=self.beat_s, silent_s=self.silent_s, grace_s=self.grace_s),
        )
