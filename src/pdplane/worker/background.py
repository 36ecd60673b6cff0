"""A task that lives as long as a `with` block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator

log = logging.getLogger(__name__)


@contextlib.contextmanager
def task(coroutine: Coroutine[None, None, None]) -> Iterator[None]:
    """Where it fails before the block ends, that is logged at once."""
    running = asyncio.get_running_loop().create_task(coroutine)
    running.add_done_callback(_log_failure)
    try:
        yield
    finally:
        running.cancel()


def _log_failure(done: asyncio.Task[None]) -> None:
    if not done.cancelled() and (error := done.exception()):
        log.error("%s ended", done.get_coro(), exc_info=error)
