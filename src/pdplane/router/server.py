"""The router as a process: its listener, its sweep, its watch over the workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from .config import RouterConfig
from .front import FrontConnection
from .health import Watch
from .routing import Router

SWEEP_S = 0.25

log = logging.getLogger(__name__)


class RouterServer:
    """``start``, then ``port``; ``stop`` ends what is still running after the grace with an explicit error."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.router: Router | None = None
        self._server: asyncio.Server | None = None
        self._watch: Watch | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listens at once; workers are looked at from now on. Raises OSError where the port is taken."""
        loop = asyncio.get_running_loop()
        self.router = router = Router(self.config, loop)
        self._server = await loop.create_server(
            lambda: FrontConnection(router), self.config.host, self.config.port, backlog=1024
        )
        self._watch = Watch(self.config, router.pairing, router.backend)
        self._watch.start()
        self._sweep = loop.call_later(SWEEP_S, self._swept, router)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def _swept(self, router: Router) -> None:
        try:
            router.sweep()
        except Exception:
            log.exception("the sweep failed; it goes on")
        self._sweep = router.loop.call_later(SWEEP_S, self._swept, router)

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no more, let what runs end within the grace, end the rest, close every connection."""
        router, server, watch = self.router, self._server, self._watch
        if router is None or server is None or watch is None:
            return
        router.stopping = True
        server.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(router.idle(), self.config.stop_grace_s if grace_s is None else grace_s)
        for exchange in list(router.active.values()):
            exchange.cancel(router.stopped())
        for driver in list(router.draining):
            driver.expired()
        router.outbox.flush()
        if self._sweep is not None:
            self._sweep.cancel()
        await watch.stop()
        for front in list(router.fronts):
            front.close()
        for worker in router.pairing.workers:
            worker.drop_idle()
        await router.guard.settle()
        await asyncio.sleep(0)
        self.router = self._server = self._watch = None


async def serve(config: RouterConfig) -> None:
    """Run until SIGTERM, SIGINT or cancellation, then stop with grace."""
    server = RouterServer(config)
    await server.start()
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stopped.set)
    log.info("router listens on http://%s:%d", config.host, server.port)
    if config.open_to_all:
        log.warning("whoever reaches %s is served, none may abort_all; --api-key says who may", config.host)
    try:
        await stopped.wait()
    finally:
        await server.stop()


def run(config: RouterConfig) -> None:
    """Run the router in this process, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(config))
    else:
        uvloop.run(serve(config))
