"""A pair with a router of its own, which reaches each side by a gate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import routers
from asked import ask
from fleet import Process
from gate import Gate
from leaving import Pair
from sides import MODEL, Side

Sides = tuple[Side, Side]


async def by_ours(
    stack: AsyncExitStack, folder: Path, sides: Sides, settings: Sequence[str], bootstrap: str = ""
) -> tuple[Pair, Process]:
    """Behind our router, which has served once. `bootstrap`: the port of prefill's registry, where there is one."""
    prefill, decode = await _gates(stack, sides)
    front = f"{prefill.url}@{bootstrap}" if bootstrap else prefill.url
    router = await stack.enter_async_context(routers.ours(folder, front, decode.url, settings))
    await ask(router.url, "completions", {"model": MODEL, "prompt": [1, 2], "max_tokens": 2})
    return Pair(router.url, *sides, prefill, decode), router


async def by_theirs(stack: AsyncExitStack, folder: Path, sides: Sides, program: Path) -> Pair:
    """Behind vllm-router, which does not say what it has in flight."""
    prefill, decode = await _gates(stack, sides)
    router = await stack.enter_async_context(routers.vllms(folder, program, prefill.url, decode.url))
    return Pair(router.url, *sides, prefill, decode, ours=False)


async def _gates(stack: AsyncExitStack, sides: Sides) -> tuple[Gate, Gate]:
    prefill, decode = (Gate(urlsplit(side.url).port or 0) for side in sides)
    return await stack.enter_async_context(prefill.open()), await stack.enter_async_context(decode.open())
