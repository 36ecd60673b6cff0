"""Looks at the workers, in turns: are they alive, who are they, what are their limits, whom may they pair with.

A worker is looked at in its interval, and at once where something makes it doubtful: an idle connection that it closed,
a request that died over it, a word of its own that it drains or does not fit. So a process that came back with other
values is met as the new one that it is.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Annotated, Any

import msgspec

from pdplane.core.ids import Shape
from pdplane.core.layout import Stamp
from pdplane.wire.registry import MAX_RANKS

from .call import CallFailed, call
from .config import RouterConfig
from .pairing import Pairing
from .worker import UNSEEN, Limits, Worker

log = logging.getLogger(__name__)

SOON_S = 0.5  # time between two looks at a worker that did not answer well
BREATH_S = 0.05  # and between two looks whatever happens
FOLLOWS_ROOM = frozenset({"", "auto", "follow_bootstrap_room"})
"""Of a prefill's dispatch, as it names it: room % dp is the rank. `auto` is resolved to that at a prefill."""


Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class ServerInfo(msgspec.Struct):
    """What is read of ``/server_info``; native engines' names beside ours. All else is ignored."""

    role: str = ""
    disaggregation_mode: str = ""
    model: str = ""
    served_model_name: str = ""
    stamp: dict[str, Any] | None = None
    limits: Limits = msgspec.field(default_factory=Limits)
    bootstrap_port: int | None = None
    disaggregation_bootstrap_port: int | None = None
    instance: str = ""
    shape: dict[str, Size] | None = None  # by axis
    dp_size: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    decode_allocation_policy: str = ""
    load_balance_method: str | None = None
    transports: object = None
    draining: bool | str | None = None

    def group(self) -> Shape:
        """`shape`, or what the field's names say."""
        if self.shape is not None:
            return Shape(**{axis: size for axis, size in self.shape.items() if axis in Shape.__struct_fields__})
        dp, tp, pp = (min(max(size or 1, 1), MAX_RANKS) for size in (self.dp_size, self.tp_size, self.pp_size))
        return Shape(dp=dp, tp=tp, pp=pp)


class Health(msgspec.Struct):
    """What is read of ``/health``."""

    draining: bool | str | None = None


_info = msgspec.json.Decoder(ServerInfo)
_health = msgspec.json.Decoder(Health)


class Watch:
    """Keeps the workers' facts and the pairing up to date."""

    def __init__(self, config: RouterConfig, pairing: Pairing) -> None:
        self._config = config
        self._pairing = pairing
        self._tasks: list[asyncio.Task[None]] = []
        self._said: dict[str, str] = {}
        self._told = 0  # refreshes of the pairing that are announced

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(worker)) for worker in self._pairing.workers]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, worker: Worker) -> None:
        misses = 0
        doubted = asyncio.Event()
        worker.doubt = doubted.set
        while True:
            doubted.clear()
            why, certain = await self._look(worker)
            misses = 0 if not why else misses + 1
            if not why or certain or misses > 1:
                worker.reason = why
            self._pairing.renew()
            self._announce()
            interval_s = self._config.health_interval_s
            await self._rest(doubted, min(interval_s, SOON_S) if why else interval_s)

    @staticmethod
    async def _rest(doubted: asyncio.Event, interval_s: float) -> None:
        """Until the next look is due, or asked for."""
        await asyncio.sleep(min(BREATH_S, interval_s))
        try:
            async with asyncio.timeout(interval_s - BREATH_S):
                await doubted.wait()
        except TimeoutError:
            return

    def _announce(self) -> None:
        """Who leaves the service or comes back is logged once, with the reason; two that clash, with both values."""
        if self._told == self._pairing.refreshes:
            return
        self._told = self._pairing.refreshes
        for worker in self._pairing.workers:
            why, said = self._pairing.why_out(worker), self._said.get(worker.url, "")
            if why != said and worker.last_heard and worker.reason != UNSEEN:
                log.warning("%s %s is %s", worker.role, worker.url, f"out of service: {why}" if why else "in service")
                self._said[worker.url] = why

    async def _look(self, worker: Worker) -> tuple[str, bool]:
        """(why it is out of service, certain): "" is in service. One timeout alone is not certain."""
        try:
            health, body = await self._get(worker, "/health")
            worker.draining = _draining(body)
            if health != 200:
                if worker.draining:
                    return f"draining: {worker.draining}", True
                said = body[:200].decode("utf-8", "replace").strip()
                return f"/health answers {health}" + (f": {said}" if said else ""), True
            status, body = await self._get(worker, "/server_info")
            why = take(worker, body) if status == 200 else ""
            return why or (f"draining: {worker.draining}" if worker.draining else ""), True
        except CallFailed as failed:
            now = monotonic()
            worker.silent = bool(worker.last_heard) and now - worker.last_heard > self._config.silent_s
            return str(failed), not worker.last_heard or str(failed) == "connection refused"

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        answer = await call(worker.address, "GET", path, timeout_s=self._config.health_timeout_s)
        worker.last_heard = monotonic()
        worker.silent = False
        return answer


def take(worker: Worker, body: bytes) -> str:
    """Take over what a worker says of itself in ``/server_info``; why it cannot serve, or ""."""
    try:
        info = _info.decode(body)
        stamp = msgspec.convert(info.stamp, Stamp) if info.stamp is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return f"/server_info cannot be read: {error}"
    if info.instance != worker.instance:
        worker.born_again()
    worker.instance, worker.stamp, worker.limits = info.instance, stamp, info.limits
    worker.model = info.model or info.served_model_name or (stamp.model if stamp else "")
    worker.set_shape(info.group(), pins_ranks=(info.load_balance_method or "") not in FOLLOWS_ROOM)
    worker.policy = info.decode_allocation_policy if stamp is not None else ""
    worker.transports = info.transports
    worker.draining = worker.draining or _words(info.draining)
    given = worker.address.bootstrap_port
    told = info.disaggregation_bootstrap_port if info.bootstrap_port is None else info.bootstrap_port
    worker.set_bootstrap(told if given is None else given)
    role = info.role or info.disaggregation_mode
    if role and role not in (worker.role, "null"):
        return f"is a {role} worker, but is listed as {worker.role}"
    return ""


def _draining(health: bytes) -> str:
    """Why a worker takes nothing new, as its health says it; "" where it does. Other bodies say nothing of it."""
    try:
        return _words(_health.decode(health).draining)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _words(draining: bool | str | None) -> str:
    return "it takes nothing new" if draining is True else draining or ""
