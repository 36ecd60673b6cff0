"""A client leaves in each phase of a hand-off: when has each side every block back?"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from asked import PATHS
from client import Call, get
from gate import Gate
from prompts import Writer, tokenizer
from rows import Rows
from sides import MODEL, Side

PROMPT_TOKENS = 700
NEW_TOKENS = 200
MOMENT_LIMIT_S = 60.0
BACK_LIMIT_S = 60.0
ATTEMPTS = 8
LOOK_S = 0.02


@dataclasses.dataclass
class Pair:
    """A pair behind its gates, and the router before them. `ours`: it says what it has in flight. `loading`: blocks of
    decode's when its moment was met."""

    front: str
    prefill: Side
    decode: Side
    prefill_gate: Gate
    decode_gate: Gate
    ours: bool = True
    loading: int = 0

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.prefill, self.decode

    def reset(self) -> None:
        self.prefill_gate.reset()
        self.decode_gate.reset()
        self.loading = 0


@dataclasses.dataclass(frozen=True)
class Phase:
    """`prepare` sets the gates; `comes` returns when the moment is there, False where it was missed."""

    name: str
    prepare: Callable[[Pair], None]
    comes: Callable[[Pair, Call], Awaitable[bool]]


@dataclasses.dataclass
class Back:
    """Blocks that were seen held when the client had left, and seconds until all were back; None: not within
    BACK_LIMIT_S."""

    held: int
    seconds: float | None

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.held} held, not back after {BACK_LIMIT_S:g} s"
        if not self.held:
            return f"none seen held, free by {self.seconds:.2f} s"
        return f"{self.held} held, back in {self.seconds:.2f} s"


async def _computes(pair: Pair, call: Call) -> bool:
    await pair.prefill_gate.asked.wait()
    await asyncio.sleep(0.1)  # the engine has taken it; whether it is through says the gate
    return not pair.prefill_gate.answered.is_set()


async def _prefill_answered(pair: Pair, call: Call) -> bool:
    await pair.prefill_gate.answered.wait()
    return True


async def _decode_asked(pair: Pair, call: Call) -> bool:
    await pair.decode_gate.asked.wait()
    return True


async def _loads(pair: Pair, call: Call) -> bool:
    await pair.decode_gate.asked.wait()
    while not call.events and not call.ended_at:
        if loading := await pair.decode.loading():
            pair.loading = loading
            return not call.events
        await asyncio.sleep(0.002)
    return False


async def _streams(pair: Pair, call: Call) -> bool:
    while call.tokens < 4 and not call.ended_at:  # noqa: ASYNC110  (it is read by another task)
        await asyncio.sleep(0.005)
    return not call.ended_at


PHASES = (
    Phase("while prefill computes", Pair.reset, _computes),
    Phase("prefill's answer on its way", lambda pair: pair.prefill_gate.reset(hold_answers=True), _prefill_answered),
    Phase("between the hops", lambda pair: pair.decode_gate.reset(hold_requests=True), _decode_asked),
    Phase("while decode loads", Pair.reset, _loads),  # or has loaded, and computes its first token
    Phase("while it streams", Pair.reset, _streams),
)


async def leave_in_each(rows: Rows, pair: Pair, limit_s: float | None, seed: int) -> dict[str, tuple[Back, Back]]:
    """`limit_s`: of the time until all blocks are back; None: measured only. By phase, (prefill, decode)."""
    writer = Writer(tokenizer(), random.Random(seed), plain=True)
    found: dict[str, tuple[Back, Back]] = {}
    for phase in PHASES:
        backs = await _met(pair, phase, writer)
        name = f"the client leaves {phase.name}"
        if backs is None:
            rows.add(name, "the moment met", f"not met in {ATTEMPTS} attempts", False)
            continue
        found[phase.name] = backs
        left = await _router_load(pair.front) if pair.ours else 0
        late = [back for back in backs if back.seconds is None or (limit_s is not None and back.seconds > limit_s)]
        wanted = "router at rest; " if pair.ours else ""
        wanted += f"blocks back within {limit_s:g} s" if limit_s else "blocks back, measured"
        got = f"prefill {backs[0]}; decode {backs[1]}" + (f"; {left} in flight at the router" if left else "")
        rows.add(name, wanted, got, not left and not late)
    pair.reset()
    return found


async def _met(pair: Pair, phase: Phase, writer: Writer) -> tuple[Back, Back] | None:
    for _ in range(ATTEMPTS):
        pair.reset()
        phase.prepare(pair)
        if backs := await _leave(pair, phase, writer.ids(PROMPT_TOKENS)):
            return backs
    return None


async def _leave(pair: Pair, phase: Phase, prompt: list[int]) -> tuple[Back, Back] | None:
    await asyncio.gather(*(_back(side, time.monotonic()) for side in pair.sides))
    call = Call(pair.front, PATHS["completions"], _body(prompt))
    await call.send()
    reading = asyncio.create_task(call.read_all())
    met = False
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOMENT_LIMIT_S):
                met = await phase.comes(pair, call)
    finally:
        call.close()
        left_at = time.monotonic()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    prefill, decode = await asyncio.gather(*(_back(side, left_at) for side in pair.sides))
    decode.held = max(decode.held, pair.loading)
    return (prefill, decode) if met else None


async def _back(side: Side, left_at: float) -> Back:
    """The most that was seen held, and until when."""
    settling = asyncio.create_task(side.settled())
    held = 0
    try:
        while time.monotonic() < left_at + BACK_LIMIT_S:
            used = await side.used()
            held = max(held, used)
            if not used and settling.done():
                return Back(held, time.monotonic() - left_at)
            await asyncio.sleep(LOOK_S)
        return Back(held, None)
    finally:
        settling.cancel()
        await asyncio.gather(settling, return_exceptions=True)


def _body(prompt: list[int]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def _router_load(front: str) -> int:
    _, told = await get(front, "/health")
    return int(told["in_flight"])
