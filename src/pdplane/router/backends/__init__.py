"""What differs between families of engines: how one is looked at, told to stop, and understood when it refuses.

One object per router, by ``--backend``; a file per family.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pdplane.core.attempts import Failure
from pdplane.core.errors import Cause
from pdplane.core.ids import Rid, Room

if TYPE_CHECKING:
    from ..upstream import Leg, WorkerAnswer
    from ..worker import Worker

Get = Callable[[str], Awaitable[tuple[int, bytes]]]
"""A path to (status, body) at the worker being looked at. Raises CallFailed."""


class EndedLeg(NamedTuple):
    """A leg that was closed before its end: its samples' rids, with their rooms where they had some. `may_hold`: where
    it had ended on the other side already, the worker holds KV under its rid."""

    path: str
    rids: tuple[Rid, ...]
    rooms: tuple[Room, ...]
    may_hold: bool = False


class StopCall(NamedTuple):
    """A POST that ends samples at a worker, or lets their KV go."""

    path: str
    body: bytes


class Backend(Protocol):
    """`names_in_body`: rids go into the body, else they are the header x-request-id alone. `hands_over_ids`: decode
    is given prefill's token ids, for want of a digest. `early_heads`: a 200 is sent before it is known whether it will
    be one, so that a stream may begin with an error. `releases`: a hold can be let go by a call."""

    name: str
    names_in_body: bool
    hands_over_ids: bool
    early_heads: bool
    releases: bool

    async def look(self, worker: Worker, get: Get) -> str:
        """After a good ``/health``: take over what the worker says of itself; why it cannot serve, or ""."""
        ...

    def stop_calls(self, ended: EndedLeg, cause: Cause) -> list[StopCall]:
        """What a worker is told of a leg that was closed, beside the closing."""
        ...

    def release_call(self, request_id: str) -> StopCall:
        """Lets go what prefill holds under this id (only where `releases`)."""
        ...

    def refusal(self, leg: Leg, said: WorkerAnswer, handed_over: bool) -> Failure:
        """A worker's error answer as a failure. `handed_over`: decode's leg carried prefill's answer."""
        ...
