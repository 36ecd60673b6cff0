"""What a worker says of itself: figures, metrics, health, and its answer to /server_info."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from pdplane import __version__
from pdplane.core.node import Node
from pdplane.observe.prometheus import labelled, single

if TYPE_CHECKING:
    from .shell import Shell

STUCK_STEP_S = 60.0
"""A step older than this means that the worker does not progress; its health says so."""


def health(shell: Shell[Node]) -> tuple[bool, dict[str, Any]]:
    """Live, ready and progressing are three answers; healthy is the last two."""
    age = shell.running_engine.step_age(time.monotonic())
    engine_error, draining = shell.running_engine.broken, shell.node.draining
    live, progressing = not (engine_error or shell.broken), age < STUCK_STEP_S
    ready = live and not (draining or shell.waits_for)
    facts = {
        "live": live,
        "ready": ready,
        "progressing": progressing,
        "step_age_s": round(age, 3),
        "draining": draining,
        "waits_for": shell.waits_for,
        "engine_error": engine_error,
        "broken": shell.broken,
        "instance": shell.instance,
    }
    return ready and progressing, facts


def figures(shell: Shell[Node]) -> dict[str, Any]:
    """Everything that must be back at its idle value when nothing runs."""
    return {"pages": _pages(shell), **_numbers(shell)}


def server_info(shell: Shell[Node]) -> dict[str, Any]:
    """Keys of the field's /server_info where there are such, ours beside them."""
    return {
        "role": shell.role,
        "disaggregation_mode": "null" if shell.role == "aggregated" else shell.role,
        "model": shell.model_name,
        "model_path": shell.model_name,
        "served_model_name": shell.model_name,
        "version": __version__,
        "instance": shell.instance,
        "tp_size": 1,
        "dp_size": 1,
        "load_balance_method": "follow_bootstrap_room",
        "bootstrap_port": shell.default_bootstrap_port,
        "disaggregation_bootstrap_port": shell.default_bootstrap_port,
        "stamp": msgspec.to_builtins(shell.stamp),
        "limits": {
            "max_prompt_tokens": shell.max_prompt_tokens,
            "context_len": shell.context_len,
            "pool_pages": shell.pool.pages,
            "page_size": shell.model.page_size,
            "max_running": shell.node.limits.max_running,
        },
        "figures": figures(shell),
        "alarms": list(shell.alarms),
    }


def metrics_text(shell: Shell[Node]) -> str:
    jobs = shell.jobs
    lines: list[str] = []
    lines += labelled("pdplane_pages", "Pages of the pool by state.", "gauge", "state", _pages(shell))
    for name, value in _numbers(shell).items():
        lines += single(f"pdplane_{name}", f"Now: {_words(name)}.", "gauge", value)
    for name in sorted({name for name, _ in shell.counts}):
        by_label = {label: count for (of, label), count in shell.counts.items() if of == name}
        lines += labelled(f"pdplane_{name}_total", f"Count of {_words(name)}.", "counter", "what", by_label)
    lines += labelled("pdplane_finished_total", "Legs by how they ended.", "counter", "what", jobs.finished)
    steps, lag_s = shell.running_engine.steps, shell.loop_lag_s
    lines += single("pdplane_engine_steps_total", "Steps of the engine.", "counter", steps)
    lines += single("pdplane_loop_lag_seconds", "How late the control loop last woke.", "gauge", lag_s)
    lines += jobs.first_token.lines("pdplane_first_token_seconds", "Leg's arrival to its first token.")
    lines += jobs.duration.lines("pdplane_leg_seconds", "Leg's arrival to its end.")
    return "\n".join(lines) + "\n"


def _pages(shell: Shell[Node]) -> dict[str, int]:
    return {page.name.lower(): count for page, count in shell.node.ledger.counts.items()}


def _numbers(shell: Shell[Node]) -> Mapping[str, int]:
    return {"jobs": len(shell.jobs), "in_engine": shell.running_engine.running, **shell.role_figures()}


def _words(name: str) -> str:
    return name.replace("_", " ")
