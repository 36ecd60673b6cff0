"""What is read of a request before it is understood: headers, and a body of bounded size."""

from __future__ import annotations

import math
from collections.abc import Mapping

from starlette.types import Receive

from pdplane.core.errors import Cause, Refused, bad_request

TIMEOUT_HEADER = "x-request-timeout"
DISCARD_BYTES = 256 * 1024 * 1024  # read and dropped of a body that is too large, so that its sender gets to the answer


class ClientGone(Exception):
    """The client closed before its body was here; there is nobody to answer."""


async def read_body(headers: Mapping[str, str], receive: Receive, limit_bytes: int) -> bytes:
    """The whole body. Raises Refused (413), where possible before any of it is sent, and ClientGone."""
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes and "expect" in headers:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    more = True
    while more and size <= limit_bytes + DISCARD_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(part)
        if size <= limit_bytes:
            parts.append(part)
        else:
            parts.clear()
    if size > limit_bytes:
        raise _too_large(limit_bytes)
    return b"".join(parts)


async def until_disconnected(receive: Receive) -> None:
    """Returns when the client has gone, or the answer is complete. Only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def deadline_of(headers: Mapping[str, str], longest_s: float) -> float:
    """Seconds that this request has from its arrival. Raises Refused (400)."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return longest_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        message = f"{TIMEOUT_HEADER} must be a number of seconds over 0, got {given!r}"
        raise Refused(bad_request(message, code="invalid_value", param=TIMEOUT_HEADER))
    return min(seconds, longest_s)


def _too_large(limit_bytes: int) -> Refused:
    return Refused(Cause("body_too_large", f"the body is over the limit of {limit_bytes} bytes", 413))
