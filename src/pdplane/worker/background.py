"""A task that lives as long as a `with` block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator


@contextlib.contextmanager
def task(coroutine: Coroutine[None, None, None]) -> Iterator[None]:
    running = asyncio.get_running_loop().create_task(coroutine)
    try:
        yield
    finally:
        running.cancel()
