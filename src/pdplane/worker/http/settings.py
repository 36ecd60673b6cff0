"""Limits of a worker's HTTP edge."""

from __future__ import annotations

import dataclasses

from pdplane.settings import setting


@dataclasses.dataclass(frozen=True)
class HttpSettings:
    body_limit_bytes: int = setting(64 * 1024 * 1024, "largest request body; a larger one is answered 413")
    request_timeout_s: float = setting(300.0, "deadline of a request; the header x-request-timeout shortens it")
    inline_body_bytes: int = setting(
        1024, "bodies up to this size are read and tokenised on the loop, larger ones off it"
    )
    probe_timeout_s: float = setting(20.0, "how long /health_generate waits for its token")
    admin_key: str = setting(
        "", "key that an operator's calls (/drain, /release) must bear when they come from elsewhere", secret=True
    )
