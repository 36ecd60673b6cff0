"""The router's settings, and how a worker is written on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from pdplane.settings import BadSetting, setting
from pdplane.wire.address import bracketed, is_loopback


@dataclass(frozen=True)
class RouterConfig:
    """Everything the router can be told. Times in seconds, sizes in bytes."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    prefill: tuple[str, ...] = setting(
        (), "a prefill worker, as URL or URL@BOOTSTRAP_PORT; give it once per worker", metavar="URL"
    )
    decode: tuple[str, ...] = setting((), "a decode worker's URL; give it once per worker", metavar="URL")
    worker: tuple[str, ...] = setting((), "an aggregated worker's URL; give it once per worker", metavar="URL")
    backend: str = setting(
        "pdplane",
        "what the workers are: pdplane (of either dialect), or native engines",
        choices=("pdplane", "sglang", "vllm"),
    )
    mode: str = setting(
        "strict", "strict: only pairs serve; fallback: aggregated workers serve while no pair is ready, and decode "
        "serves alone what prefill hands nothing over for",
        choices=("strict", "fallback"),
    )  # fmt: skip
    policy: str = setting("least-load", "how workers are picked", choices=("least-load", "round-robin"))
    retries: int = setting(1, "further attempts on other workers before the first byte of an answer")
    request_timeout_s: float = setting(300.0, "deadline of a request; the header x-request-timeout shortens it")
    drain_s: float = setting(30.0, "how long prefill's leg may outlast a finished answer")
    vllm_lease_s: float = setting(30.0, "how long a native vLLM prefill holds KV for decode (its kv_lease_duration)")
    lease_margin_s: float = setting(1.0, "decode's leg is sent only while this much of prefill's lease is left")
    max_body_bytes: int = setting(32 * 1024 * 1024, "largest request body")
    max_head_bytes: int = setting(64 * 1024, "largest request head")
    max_inflight: int = setting(10_000, "requests in flight before new ones get 429")
    max_samples: int = setting(1024, "prompts x n of one request")
    api_key: str = setting(
        "", "the key that clients must present as a bearer token; none: open, but beyond loopback without abort_all",
        secret=True,
    )  # fmt: skip
    health_interval_s: float = setting(2.0, "time between two looks at a worker")
    health_timeout_s: float = setting(2.0, "how long a worker may take to answer a look")
    silent_s: float = setting(8.0, "a worker that answers nothing for so long has its requests ended")
    ban_after: int = setting(3, "failures in a row after which a worker is avoided")
    ban_s: float = setting(5.0, "how long it is avoided, while others can serve; doubled each time in a row")
    ban_max_s: float = setting(120.0, "the longest that it is avoided")
    connect_timeout_s: float = setting(3.0, "limit for opening a connection to a worker")
    idle_s: float = setting(4.0, "idle connections to workers are closed after this (below the workers' own limit)")
    read_timeout_s: float = setting(60.0, "a client must have sent its whole request after this")
    stop_grace_s: float = setting(5.0, "how long running requests may go on when the router stops")
    records: int = setting(2048, "request records that are kept")
    log_level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        for name in ("retries", "max_body_bytes", "max_inflight", "port", "lease_margin_s"):
            if getattr(self, name) < 0:
                raise BadSetting(f"{name} is {getattr(self, name)}; it cannot be negative")
        for name in ("request_timeout_s", "health_interval_s", "health_timeout_s", "connect_timeout_s", "vllm_lease_s"):
            if getattr(self, name) <= 0:
                raise BadSetting(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.backend == "vllm" and self.lease_margin_s >= self.vllm_lease_s:
            raise BadSetting(
                f"lease_margin_s {self.lease_margin_s:g} leaves nothing of vllm_lease_s {self.vllm_lease_s:g}: decode "
                "would never be asked; give a smaller margin, or the lease that the engines have"
            )

    @property
    def open_to_all(self) -> bool:
        """Whether strangers share this door: nobody's calls can be told from anybody else's."""
        return not self.api_key and not is_loopback(self.host)


@dataclass(frozen=True)
class Address:
    """Where a worker listens. `url` is its name everywhere; `bootstrap_port` only for a prefill that was given one."""

    url: str
    host: str
    port: int
    bootstrap_port: int | None = None

    @property
    def netloc(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def parse_address(text: str) -> Address:
    """``http://host:port`` or ``http://host:port@bootstrap_port``; the scheme may be left out. Raises BadSetting."""
    wrong = BadSetting(f"{text!r} is not a worker; write http://HOST:PORT or http://HOST:PORT@BOOTSTRAP_PORT")
    url, at, bootstrap = text.strip().rstrip("/").partition("@")
    try:
        parts = urlsplit(url if "://" in url else "http://" + url)
        host, port = parts.hostname, parts.port or (80 if "://" in url else 0)
        bootstrap_port = int(bootstrap) if at else None
    except ValueError:
        raise wrong from None
    if (
        parts.scheme != "http"
        or not host
        or not port
        or (bootstrap_port is not None and not 0 < bootstrap_port < 65536)
    ):
        raise wrong
    return Address(f"http://{bracketed(host)}:{port}", host, port, bootstrap_port)
