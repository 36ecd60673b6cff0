"""Pages of dropped requests while the peer is frozen (SIGSTOP) or killed (SIGKILL): who holds what, what gives it back.

Requests of every phase run; the peer goes; the clients leave. From then on each look at the live side must account for
every page. When the peer is back, all pages come back, or stay in quarantine with a holder that is named, and then the
operator's verb gives them back. Last, the fleet must answer as before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from client import Call, get
from comparing import PAGE
from fleet import Fleet, Process
from idle import RESTING, errors_logged, not_idle
from prompts import Writer, tokenizer
from storm import PATH, answer, body

WORKER_ARGS = (
    *("--batch-invariant", "--pool-mb", "512"),
    *("--beat-s", "0.5", "--silent-s", "2", "--grace-s", "1", "--drain-limit-s", "2"),
)
GONE_S, DRAIN_LIMIT_S = 3.0, 2.0
"""After how long a silent peer counts as gone, and draining pages as in quarantine, under these settings."""

BACK_LIMIT_S = 10.0
MOMENT_LIMIT_S = 5.0
SHARED_TOKENS = 640
ROUNDS = 5
"""Of long prompts, until a moment is met at which their pages move."""

CASES = (("prefill", "frozen"), ("decode", "frozen"), ("prefill", "killed"), ("decode", "killed"))
RELEASED = ("prefill", "given up")
"""Frozen for good: what it holds is given back by the operator's verb, and then it is killed and started again. Only
where a writer's pages need its own word; and since the moment must be met at which it writes, some attempts."""

ATTEMPTS = 3
FREEZES = 400


@dataclasses.dataclass
class Row:
    """What one fault showed. Pages are those of the live side."""

    transport: str
    peer: str
    how: str
    held: int = 0  # by requests, when their clients left
    at_once: int = 0  # of these, reusable at the first look after
    reusable_s: float | None = None  # all of them, since the clients left; None: not before the peer came back
    draining: int = 0  # most at a look
    quarantined: int = 0  # most at a look
    holders: list[str] = dataclasses.field(default_factory=list)
    back_s: float = 0.0  # from the peer's return to the last page
    released: int = 0  # by the operator's verb
    alarms: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)


async def faults(running: Fleet, transport: str, rng: random.Random) -> list[Row]:
    """One row for each of CASES, and for RELEASED where the peer writes itself."""
    assert running.router is not None
    writer = Writer(tokenizer(), rng, plain=True)
    known = [(writer.ids(40), 8), (writer.ids(90), 12)]
    expected = [await answer(running.router.url, prompt, most) for prompt, most in known]
    rows: list[Row] = []
    for peer, how in (*CASES, *[RELEASED] * (ATTEMPTS if transport == "shm_push" else 0)):
        if any(row.how == how and row.released for row in rows):
            break
        trial = _Trial(running, Row(transport, peer, how), writer)
        await trial.run()
        after = [await answer(running.router.url, prompt, most) for prompt, most in known]
        if after != expected:
            trial.row.faults.append(f"answers afterwards are {after}, were {expected}")
        trial.row.faults += errors_beside_alarms(running, trial.row)
        rows.append(trial.row)
    return rows


def errors_beside_alarms(running: Fleet, row: Row) -> list[str]:
    """An alarm is logged as an error, and is looked at by itself; a quarantine is no fault of ours."""
    odd = [alarm for alarm in row.alarms if "quarantined" not in alarm and "unproven" not in alarm]
    return odd + [line for line in errors_logged(running.all) if "quarantined" not in line and "unproven" not in line]


class _Trial:
    def __init__(self, running: Fleet, row: Row, writer: Writer) -> None:
        self.running = running
        self.row = row
        self._writer = writer
        [prefill], [decode] = running.prefills, running.decodes
        self.victim, self.live = (prefill, decode) if row.peer == "prefill" else (decode, prefill)
        self._calls: list[Call] = []
        self._reading: list[asyncio.Task[None]] = []
        self._alarms_before = 0

    async def run(self) -> None:
        self._alarms_before = len((await self._told())["alarms"])
        await self._fill()
        self.row.held = self._held(await self._pages())
        if self.row.how == "killed":
            self.victim.send(signal.SIGKILL)
        else:
            await self._freeze()
        left_at = await self._leave()
        try:
            await self._watch(left_at)
            if self.row.how == "given up":
                await self._release()
        finally:
            await self._bring_back()
        await self._settle()
        self.row.alarms = (await self._told())["alarms"][self._alarms_before :]

    # --- requests in every phase ----------------------------------------------------------------------------------

    async def _fill(self) -> None:
        """Streams that run; prompts that are computed; long ones that are cached, so that all of their pages move at
        once."""
        shared = self._writer.ids(SHARED_TOKENS)
        assert self.running.router is not None
        await answer(self.running.router.url, shared, 1)
        for tokens in (20, 30, 40):
            self._ask(self._writer.ids(tokens), 400)
        await self._until(lambda: all(call.tokens > 1 for call in self._calls))
        for tokens in (200, 300):
            self._ask(self._writer.ids(tokens), 16)
        for _ in range(ROUNDS):
            for _ in range(4):
                self._ask(shared + self._writer.ids(20), 16)
            if await self._moving():
                return

    async def _freeze(self) -> None:
        """In the midst of a write where it writes itself, if that can be met: only such a write needs a proof."""
        for _ in range(FREEZES):
            self.victim.send(signal.SIGSTOP)
            if self.row.transport != "shm_push" or self.row.peer == "decode" or _write_locks():
                return
            self.victim.send(signal.SIGCONT)
            await asyncio.sleep(0.001)
        self.victim.send(signal.SIGSTOP)

    def _ask(self, prompt: list[int], most: int) -> None:
        assert self.running.router is not None
        call = Call(self.running.router.url, PATH, body(prompt, most, stream=True))
        self._calls.append(call)
        self._reading.append(asyncio.create_task(_read(call)))

    async def _moving(self) -> bool:
        """Whether a moment came at which decode waits for long prompts and prefill has pages on their way, as far as
        looking can tell."""
        [prefill], [decode] = self.running.prefills, self.running.decodes
        until = time.monotonic() + MOMENT_LIMIT_S
        while time.monotonic() < until:
            granted = (await get(decode.url, "/server_info"))[1]["figures"]["pages"]["granted"]
            sending = (await get(prefill.url, "/server_info"))[1]["figures"]["pages"]["sending"]
            if sending and granted >= 2 * SHARED_TOKENS // PAGE:
                return True
            if not any(call.tokens == 0 and not call.ended_at for call in self._calls):
                return False
        return False

    async def _until(self, true: Callable[[], bool]) -> None:
        until = time.monotonic() + MOMENT_LIMIT_S
        while time.monotonic() < until:
            if true():
                return
            await asyncio.sleep(0.02)

    async def _leave(self) -> float:
        for call in self._calls:
            call.close()
        left_at = time.monotonic()
        for reading in self._reading:
            reading.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        return left_at

    # --- what the live side says ----------------------------------------------------------------------------------

    async def _told(self) -> dict[str, Any]:
        _, told = await get(self.live.url, "/server_info")
        found: dict[str, Any] = told
        return found

    async def _pages(self) -> dict[str, int]:
        """By state; notes a sum that is not the capacity, and who holds what is in quarantine."""
        told = await self._told()
        pages: dict[str, int] = told["figures"]["pages"]
        capacity = told["limits"]["pool_pages"]
        if sum(pages.values()) != capacity:
            self.row.faults.append(f"{self.live.name} accounts for {sum(pages.values())} of {capacity} pages: {pages}")
        self.row.draining = max(self.row.draining, pages["draining"])
        if pages["quarantined"] > self.row.quarantined:
            self.row.quarantined = pages["quarantined"]
            self.row.holders = [_holder(one) for one in told["quarantined"]]
            named = sum(one["pages"] for one in told["quarantined"])
            if named != pages["quarantined"] or "nobody" in self.row.holders:
                self.row.faults.append(f"{pages['quarantined']} pages in quarantine, {named} with a holder: {told}")
        return pages

    @staticmethod
    def _held(pages: dict[str, int]) -> int:
        return sum(count for state, count in pages.items() if state not in RESTING)

    async def _watch(self, left_at: float) -> None:
        """Until every page is reusable, or no more can be expected before the peer is back."""
        left = self._held(await self._pages())
        self.row.at_once = max(0, self.row.held - left)
        until = left_at + GONE_S + DRAIN_LIMIT_S + 2.0
        while left and time.monotonic() < until:
            await asyncio.sleep(0.01)
            pages = await self._pages()
            left = self._held(pages)
            if left and left == pages["quarantined"] and time.monotonic() > left_at + GONE_S + 0.5:
                return
        if not left:
            self.row.reusable_s = time.monotonic() - left_at

    # --- the peer comes back --------------------------------------------------------------------------------------

    async def _bring_back(self) -> None:
        if self.row.how == "frozen":
            self.victim.send(signal.SIGCONT)
        else:
            self.victim.kill()  # reaped
            self.victim.start()
        await asyncio.to_thread(self.victim.wait_ready)

    async def _settle(self) -> None:
        """Pages come back; the operator gives back what does not; both sides and the router are at rest."""
        back_at = time.monotonic()
        if await self._left(back_at + BACK_LIMIT_S):
            await self._release()
        self.row.back_s = time.monotonic() - back_at
        until = time.monotonic() + BACK_LIMIT_S
        while time.monotonic() < until:
            if not (rest := self._not_at_rest()):
                return
            await asyncio.sleep(0.05)
        self.row.faults += [f"{BACK_LIMIT_S:g} s after the peer's return: {what}" for what in rest]

    async def _release(self) -> None:
        before = await self._pages()
        for one in (await self._told())["quarantined"]:
            self.row.released += await asyncio.to_thread(_release, self.live, one, self.row)
        after = await self._pages()
        if before["quarantined"] - after["quarantined"] != self.row.released:
            self.row.faults.append(f"{self.row.released} pages released, {before} became {after}")

    async def _left(self, until: float) -> int:
        """Pages that requests still hold then; 0 as soon as it is so."""
        while time.monotonic() < until:
            if not self._held(await self._pages()):
                return 0
            await asyncio.sleep(0.02)
        return self._held(await self._pages())

    def _not_at_rest(self) -> list[str]:
        """Alarms aside: a quarantine leaves one, and that is as it should be. Aside too is half a frame of one that
        was killed while it wrote. And the router must have a pair again."""
        assert self.running.router is not None
        left = [what for what in not_idle(self.running) if ": alarm: " not in what]
        if (self.row.peer, self.row.how) == ("prefill", "killed"):
            halves = self.live.log.read_text(errors="replace").count("data connection closed: half a frame of")
            left = [what for what in left if not (halves and what.endswith(f": bad_data_frames {halves}"))]
        missing = self.running.router.get("/ready").get("missing", "")
        return left + ([f"router: {missing}"] if missing else [])


def _write_locks() -> int:
    """How many locks a writer of this machine holds now (shm_push takes a shared one for each batch that it writes)."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    return sum("OFDLCK" in line and "READ" in line for line in lines)


async def _read(call: Call) -> None:
    await call.send()
    await call.read_all()


def _holder(one: dict[str, Any]) -> str:
    """Who has to prove that the pages are quiet."""
    holders = one.get("no_proof_from") or [grant["instance"] for grant in one.get("grants", [])]
    return f"{one['pages']} by {', '.join(holders)}" if holders else "nobody"


def _release(live: Process, one: dict[str, Any], row: Row) -> int:
    """`pdplane release`, as an operator does it; how many pages are free by it."""
    if "grant" not in one:
        row.faults.append(f"{live.name} keeps {one['pages']} pages that no verb gives back: {one}")
        return 0
    named = ["--instance", one["instance"], "--grant", str(one["grant"])]
    command = [sys.executable, "-m", "pdplane", "release", live.url, *named]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
    if done.returncode:
        row.faults.append(f"{' '.join(command[2:])}: {done.stdout} {done.stderr}")
        return 0
    return int(one["pages"])


def table(rows: list[Row]) -> list[str]:
    lines = [
        f"{'transport':10}{'peer':9}{'is':8}{'held':>6}{'at once':>9}{'reusable, ms':>14}{'draining':>10}"
        f"{'quarantined':>13}{'back, ms':>10}{'released':>10}{'alarms':>8}   holders"
    ]
    for row in rows:
        reusable = "-" if row.reusable_s is None else f"{row.reusable_s * 1000:.0f}"
        lines.append(
            f"{row.transport:10}{row.peer:9}{row.how:8}{row.held:6}{row.at_once:9}{reusable:>14}{row.draining:10}"
            f"{row.quarantined:13}{row.back_s * 1000:10.0f}{row.released:10}{len(row.alarms):8}"
            f"   {'; '.join(row.holders) or '-'}"
        )
    return lines
