"""Looks at the workers, in turns: are they alive, who are they, what are their limits, whom may they pair with."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Any

import msgspec

from pdplane.core.layout import Stamp

from .call import CallFailed, call
from .config import RouterConfig
from .pairing import Pairing
from .worker import UNSEEN, Limits, Worker

log = logging.getLogger(__name__)

SOON_S = 0.5  # time between two looks at a worker that did not answer well


class ServerInfo(msgspec.Struct):
    """What is read of ``/server_info``; native engines' names beside ours."""

    role: str = ""
    disaggregation_mode: str = ""
    model: str = ""
    served_model_name: str = ""
    stamp: dict[str, Any] | None = None
    limits: Limits = msgspec.field(default_factory=Limits)
    bootstrap_port: int | None = None
    instance: str = ""


_info = msgspec.json.Decoder(ServerInfo)


class Watch:
    """Keeps the workers' facts and the pairing up to date."""

    def __init__(self, config: RouterConfig, pairing: Pairing) -> None:
        self._config = config
        self._pairing = pairing
        self._tasks: list[asyncio.Task[None]] = []
        self._said: dict[str, str] = {}

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(worker)) for worker in self._pairing.workers]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, worker: Worker) -> None:
        misses = 0
        while True:
            before = self._facts(worker)
            why, certain = await self._look(worker)
            misses = 0 if not why else misses + 1
            if not why or certain or misses > 1:
                worker.reason = why
            if self._facts(worker) != before:
                self._pairing.refresh()
                self._announce()
            interval_s = self._config.health_interval_s
            await asyncio.sleep(min(interval_s, SOON_S) if why else interval_s)

    def _announce(self) -> None:
        """Who leaves the service or comes back is logged once, with the reason; two that clash, with both values."""
        for worker in self._pairing.workers:
            why, said = self._pairing.why_out(worker), self._said.get(worker.url, "")
            if why != said and worker.last_heard and worker.reason != UNSEEN:
                log.warning("%s %s is %s", worker.role, worker.url, f"out of service: {why}" if why else "in service")
                self._said[worker.url] = why

    @staticmethod
    def _facts(worker: Worker) -> tuple[object, ...]:
        return (bool(worker.reason), worker.instance, worker.stamp)

    async def _look(self, worker: Worker) -> tuple[str, bool]:
        """(why it is out of service, certain): "" is in service. One timeout alone is not certain."""
        try:
            health, body = await self._get(worker, "/health")
            if health != 200:
                said = body[:200].decode("utf-8", "replace").strip()
                return f"/health answers {health}" + (f": {said}" if said else ""), True
            status, body = await self._get(worker, "/server_info")
            return (self._take(worker, body) if status == 200 else ""), True
        except CallFailed as failed:
            now = monotonic()
            worker.silent = bool(worker.last_heard) and now - worker.last_heard > self._config.silent_s
            return str(failed), not worker.last_heard or str(failed) == "connection refused"

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        answer = await call(worker.address, "GET", path, timeout_s=self._config.health_timeout_s)
        worker.last_heard = monotonic()
        worker.silent = False
        return answer

    @staticmethod
    def _take(worker: Worker, body: bytes) -> str:
        """Take over what a worker says of itself; why it cannot serve, or ""."""
        try:
            info = _info.decode(body)
            stamp = msgspec.convert(info.stamp, Stamp) if info.stamp is not None else None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"/server_info cannot be read: {error}"
        if info.instance != worker.instance:
            worker.drop_idle()  # another process: nothing that is cached of the old one holds
            worker.failures_in_a_row = 0
            worker.avoid = ""
        worker.instance, worker.stamp, worker.limits = info.instance, stamp, info.limits
        worker.model = info.model or info.served_model_name or (stamp.model if stamp else "")
        if worker.address.bootstrap_port is None:
            worker.set_bootstrap(info.bootstrap_port)
        role = info.role or info.disaggregation_mode
        if role and role not in (worker.role, "null"):
            return f"is a {role} worker, but is listed as {worker.role}"
        return ""
