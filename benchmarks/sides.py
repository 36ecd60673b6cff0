"""What an engine says of itself: its blocks that no other request could have now, what it loads, what it has loaded."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import quote

import httpx
from asked import ask
from client import get
from idle import RESTING

from pdplane.engine.install import DEFAULT_MODEL

MODEL = DEFAULT_MODEL
"""As every server of a run calls it."""


class Side(Protocol):
    """One engine. `loading`: of a decode that has shown no token yet, blocks in use for KV that comes, 0 while none
    comes. `settled`: what it says of itself is no older than the call."""

    name: str
    url: str

    async def used(self) -> int: ...

    async def loading(self) -> int: ...

    async def settled(self) -> None: ...


class VllmSide:
    """Blocks by `vllm:kv_cache_usage_perc`, which an engine renews at each step, so that an idle one says the last."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url

    async def used(self) -> int:
        text = await metrics(self.url)
        blocks = int(re.findall(r'num_gpu_blocks="(\d+)"', text)[0])  # one of them is nobody's
        return round(total(text, "vllm:kv_cache_usage_perc") * (blocks - 1))

    async def loading(self) -> int:
        """It has them from the fetch on; its gauge of fetches is gone too soon to be seen."""
        return await self.used()

    async def settled(self) -> None:
        """A request of its own, of one token, makes a step."""
        await ask(self.url, "completions", {"model": MODEL, "prompt": [1], "max_tokens": 1})


class OurSide:
    """Pages by /server_info, which its control thread answers from the ledger."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url

    async def used(self) -> int:
        return _pages(await self._figures())

    async def loading(self) -> int:
        figures = await self._figures()
        return _pages(figures) if figures.get("parked", True) else 0  # of rooms, pages that are granted

    async def settled(self) -> None:
        await asyncio.sleep(0)

    async def handed_over(self, ids: Sequence[str]) -> bool:
        """Whether this decode fetched the prompt's KV, of each sample of a request, or had it from before. `ids`: the
        first by which this engine knows the request counts."""
        for request in filter(None, ids):
            status, told = await get(self.url, f"/requests/{quote(request)}")
            if status == 200:
                return all(map(_came_or_was_there, told["legs"]))
        return False

    async def _figures(self) -> dict[str, Any]:
        _, told = await get(self.url, "/server_info")
        figures: dict[str, Any] = told["figures"]
        return figures


def _pages(figures: dict[str, Any]) -> int:
    return sum(count for state, count in figures["pages"].items() if state not in RESTING)


def _came_or_was_there(leg: dict[str, Any]) -> bool:
    return any(grant["pages"] for grant in leg["grants"]) or any(one["state"] == "cached" for one in leg["entries"])


async def metrics(url: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
        return (await http.get(f"{url}/metrics")).text


def total(text: str, name: str, labels: str = "") -> float:
    """A metric summed over its samples, of those that hold `labels`; 0 where there is none."""
    found = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for where, value in found if labels in where)
