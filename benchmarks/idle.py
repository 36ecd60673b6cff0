"""Is a fleet back at its idle figures: no page taken, no room, job or leg left, nothing alarmed?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fleet import Fleet, Process

STANDING = frozenset({"pages", "tombstones", "control_sessions", "groups"})
"""Figures that are not 0 when nothing runs: pages are looked at one by one, the rest is memory of what was, or says
again group by group what the sums say."""

RESTING = ("free", "cached")
"""Where pages are when nothing runs."""


def wait_idle(fleet: Fleet, limit_s: float) -> tuple[float, list[str]]:
    """(seconds waited, what is not idle even so: empty is the only good answer)."""
    started = time.monotonic()
    while True:
        left = not_idle(fleet)
        waited = time.monotonic() - started
        if not left or waited > limit_s:
            return waited, left
        time.sleep(0.02)


def not_idle(fleet: Fleet) -> list[str]:
    found = [fault for worker in fleet.workers for fault in _of_worker(worker)]
    return found + (_of_router(fleet.router) if fleet.router else [])


def errors_logged(processes: Sequence[Process]) -> list[str]:
    """What the processes called an error: a cancel or a dead peer is none, a stack trace even less."""
    return [
        f"{process.name} logged: {line}"
        for process in processes
        for line in process.log.read_text(errors="replace").splitlines()
        if " ERROR " in line or line.startswith("Traceback")
    ]


def _of_worker(worker: Process) -> list[str]:
    told: dict[str, Any] = worker.get("/server_info")
    figures = told["figures"]
    pages = figures["pages"]
    faults = [f"{worker.name}: {name} {value}" for name, value in figures.items() if name not in STANDING and value]
    faults += [
        f"{worker.name}: {count} pages {state}" for state, count in pages.items() if state not in RESTING and count
    ]
    capacity, resting = told["limits"]["pool_pages"] * told["dp_size"], sum(pages[state] for state in RESTING)
    if resting != capacity:
        faults.append(f"{worker.name}: {resting} of {capacity} pages free or cached")
    return faults + [f"{worker.name}: alarm: {alarm}" for alarm in told["alarms"]]


def _of_router(router: Process) -> list[str]:
    in_flight = router.get("/health")["in_flight"]
    faults = [f"router: {in_flight} in flight"] if in_flight else []
    for worker in router.get("/workers")["workers"]:
        if worker["load"]:
            faults.append(f"router: load {worker['load']} on {worker['role']} {worker['url']}")
    return faults
