"""Causes: why something ended, whose side said so, and whether trying again is safe.

A cause is data and crosses wires; the first one of a request stays (rule 1). `status` is the HTTP status that
the client of that leg gets when this cause is its answer.
"""

from __future__ import annotations

import msgspec


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """code: stable, snake_case, for machines. message: names the values and the remedy, for people.

    side: "prefill" | "decode" | "router" | "", where it arose, which need not be where it was noticed: a retry avoids
    the worker of that side, so a dead peer is named and not the one who misses it.
    retryable: nothing of the request can still have an effect elsewhere that a new attempt (new room, new rid) would
    meet.
    """

    code: str
    message: str
    status: int = 500
    retryable: bool = False
    side: str = ""
    param: str | None = None
    retry_after_s: int | None = None

    def __str__(self) -> str:
        where = f" ({self.side})" if self.side else ""
        return f"{self.code}{where}: {self.message}"

    @property
    def expected(self) -> bool:
        """True where this end is nobody's fault (a client that left): never logged as an error."""
        return self.code in EXPECTED


EXPECTED = frozenset({"client_left", "aborted", "peer_leg_closed"})
CLIENT_CLOSED = 499  # nginx's status for a client that left; only ever seen in records and metrics


class Refused(Exception):
    """A request that an edge turns away, with its cause; nothing was allocated."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(str(cause))
        self.cause = cause


def client_left(side: str) -> Cause:
    return Cause("client_left", "the client closed its connection", CLIENT_CLOSED, side=side)


def aborted(side: str) -> Cause:
    return Cause("aborted", "the request was aborted by an abort call", CLIENT_CLOSED, side=side)


def deadline(side: str, after_s: float) -> Cause:
    return Cause("deadline", f"the request's deadline of {after_s:g} s passed", 504, side=side)


def bad_request(message: str, *, code: str = "bad_request", param: str | None = None, side: str = "") -> Cause:
    return Cause(code, message, 400, param=param, side=side)


def busy(message: str, *, side: str, retry_after_s: int = 1) -> Cause:
    return Cause("overloaded", message, 429, retryable=True, side=side, retry_after_s=retry_after_s)


def duplicate_room(room: int, side: str) -> Cause:
    text = f"room {room} is in use or was used; every attempt needs a room and a rid of its own"
    return Cause("duplicate_room", text, 409, side=side)


def duplicate_rid(rid: str, side: str) -> Cause:
    return Cause("duplicate_rid", f"rid {rid!r} is in use; every attempt needs a rid of its own", 409, side=side)


def unavailable(code: str, message: str, *, side: str, status: int = 503) -> Cause:
    return Cause(code, message, status, retryable=True, side=side)
