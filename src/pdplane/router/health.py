"""Looks at the workers, in turns: are they alive, who are they, what are their limits, whom may they pair with.

A worker is looked at in its interval, and at once where something makes it doubtful: an idle connection that it closed,
a request that died over it, a word of its own that it drains or does not fit. So a process that came back with other
values is met as the new one that it is.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

import msgspec

from pdplane.wire.body import NOT_JSON

from .backends import Backend
from .backends.pdplane import words
from .call import CallFailed, call
from .config import RouterConfig
from .pairing import Pairing
from .worker import UNSEEN, Worker

log = logging.getLogger(__name__)

SOON_S = 0.5  # time between two looks at a worker that did not answer well
BREATH_S = 0.05  # and between two looks whatever happens


class Health(msgspec.Struct):
    """What is read of ``/health``."""

    draining: bool | str | None = None


_health = msgspec.json.Decoder(Health)


class Watch:
    """Keeps the workers' facts and the pairing up to date. The router's own key, which clients present and legs carry
    on, goes with every look: engines that were given it guard their facts by it as well."""

    def __init__(self, config: RouterConfig, pairing: Pairing, backend: Backend) -> None:
        self._config = config
        self._backend = backend
        self._authorization = b"authorization: Bearer %b\r\n" % config.api_key.encode() if config.api_key else b""
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
            why = await self._backend.look(worker, lambda path: self._get(worker, path))
            return why or (f"draining: {worker.draining}" if worker.draining else ""), True
        except CallFailed as failed:
            now = monotonic()
            worker.silent = bool(worker.last_heard) and now - worker.last_heard > self._config.silent_s
            return str(failed), not worker.last_heard or str(failed) == "connection refused"

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        answer = await call(
            worker.address, "GET", path, headers=self._authorization, timeout_s=self._config.health_timeout_s
        )
        worker.last_heard = monotonic()
        worker.silent = False
        return answer


def _draining(health: bytes) -> str:
    """Why a worker takes nothing new, as its health says it; "" where it does. Other bodies say nothing of it."""
    try:
        return words(_health.decode(health).draining)
    except NOT_JSON:
        return ""
