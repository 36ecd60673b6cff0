"""One daemon thread around one selector: what a tcp mover or landing runs its sockets on."""

from __future__ import annotations

import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

Ready = Callable[[int], None]
"""Called with the selector's event mask, on the thread."""


class IoThread:
    """Runs posted calls, timers and ready sockets, one after the other. A call that raises is logged; the thread goes
    on, so that one connection's fault stays its own."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wakes)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """From any thread: `call` runs on this one, in order, even if `stop` follows."""
        self._calls.append(call)
        try:
            self._wake_in.send(b"w")
        except BlockingIOError:
            pass  # wake-ups enough are under way
        except OSError:
            log.debug("posted to a stopped thread")

    def stop(self) -> None:
        """Runs what was posted, ends the thread and joins it. Idempotent; not from the thread itself."""
        if self._selector.get_map() is None:
            return
        self.post(self._stop)
        self._thread.join()
        self._selector.close()
        self._wake_out.close()
        self._wake_in.close()

    # --- on the thread ---

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), call))

    def watch(self, sock: socket.socket, events: int, ready: Ready) -> None:
        """Watch for `events` from now on, instead of what was watched before; 0 ends it."""
        known = sock.fileno() >= 0 and sock in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(sock)
        elif known:
            self._selector.modify(sock, events, ready)
        else:
            self._selector.register(sock, events, ready)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            for key, mask in self._selector.select(self._wait_s()):
                self._guarded(lambda ready=key.data, mask=mask: ready(mask))  # type: ignore[misc]
            while self._calls:
                self._guarded(self._calls.popleft())
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._guarded(heapq.heappop(self._timers)[2])

    def _wait_s(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _drain_wakes(self, mask: int) -> None:
        self._wake_out.recv(4096)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("fault on %s", self._thread.name)
