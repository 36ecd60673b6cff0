"""What a worker says of itself: figures, metrics, health, and its answer to /server_info."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pdplane import __version__
from pdplane.core.layout import PARAMS
from pdplane.core.node import Node
from pdplane.observe.prometheus import Histogram, Row, family

if TYPE_CHECKING:
    from .group import Group
    from .shell import Shell

STUCK_STEP_S = 60.0
"""A step older than this means that the worker does not progress; its health says so."""


def health(group: Group[Shell[Node]]) -> tuple[bool, dict[str, Any]]:
    """Live, ready and progressing are three answers; healthy is the last two. A worker is as well as its sickest
    group."""
    of_each = [_health(shell, bool(group.waits_for)) for shell in group.shells]
    told = {
        "live": all(one["live"] for one in of_each),
        "ready": all(one["ready"] for one in of_each),
        "progressing": all(one["progressing"] for one in of_each),
        "step_age_s": max(one["step_age_s"] for one in of_each),
        "draining": next((one["draining"] for one in of_each if one["draining"]), ""),
        "left": group.live,
        "waits_for": group.waits_for,
        "engine_error": next((one["engine_error"] for one in of_each if one["engine_error"]), ""),
        "broken": next((one["broken"] for one in of_each if one["broken"]), ""),
        "instance": group.process,
    }
    if len(of_each) > 1:
        told["groups"] = of_each
    return told["ready"] and told["progressing"], told


def _health(shell: Shell[Node], waits: bool) -> dict[str, Any]:
    age = shell.running_engine.step_age(time.monotonic())
    engine_error, draining = shell.running_engine.broken, shell.node.draining
    live = not (engine_error or shell.broken)
    return {
        "live": live,
        "ready": live and not (draining or waits),
        "progressing": age < STUCK_STEP_S,
        "step_age_s": round(age, 3),
        "draining": draining,
        "engine_error": engine_error,
        "broken": shell.broken,
        "instance": shell.instance,
    }


def figures(shells: Sequence[Shell[Node]]) -> dict[str, Any]:
    """Everything that must be back at its idle value when nothing runs, summed over the groups."""
    told: dict[str, Any] = {"pages": _summed(map(pages, shells)), **_summed(map(numbers, shells))}
    if len(shells) > 1:
        told["groups"] = [{"pages": pages(shell), **numbers(shell)} for shell in shells]
    return told


def server_info(group: Group[Shell[Node]]) -> dict[str, Any]:
    """Keys of the field's /server_info where there are such, ours beside them."""
    first, config, shells = group.shells[0], group.config, group.shells
    return {
        "role": group.role,
        "disaggregation_mode": "null" if group.role == "aggregated" else group.role,
        "model": group.model_name,
        "model_path": group.model_name,
        "served_model_name": group.model_name,
        "version": __version__,
        "instance": group.process,
        "instances": [shell.instance for shell in shells],
        "tp_size": config.tp,
        "dp_size": config.dp,
        "shape": msgspec.structs.asdict(config.shape),
        "dialect": config.dialect,
        "load_balance_method": config.load_balance_method,
        "decode_allocation_policy": config.decode_allocation_policy,
        "lease_s": config.lease_s if config.dialect == PARAMS else None,
        "kv_load_failure_policy": config.kv_load_failure_policy if config.dialect == PARAMS else None,
        "transports": list(config.transports),
        "bootstrap_port": group.default_bootstrap_port,
        "disaggregation_bootstrap_port": group.default_bootstrap_port,
        "draining": group.draining,
        "stamp": msgspec.to_builtins(first.parts.stamp),
        "limits": {
            "max_prompt_tokens": group.max_prompt_tokens,
            "context_len": group.context_len,
            "pool_pages": first.parts.pages,
            "page_size": group.model.page_size,
            "max_running": first.node.limits.max_running,
        },
        "figures": figures(shells),
        "quarantined": [one for shell in shells for one in shell.quarantined()],
        "refused_sessions": [one for shell in shells for one in shell.refused_sessions()],
        "holds": group.holds,
        "peers": [one for shell in shells for one in shell.peers()],
        "alarms": [alarm for shell in shells for alarm in shell.alarms],
    }


def metrics_text(shells: Sequence[Shell[Node]]) -> str:
    """Every sample carries the dp rank that it is of."""
    lines: list[str] = []
    lines += family("pdplane_pages", "Pages of the pool by state.", "gauge", _labelled(shells, "state", pages))
    for name in numbers(shells[0]):
        values = _each(shells, lambda shell, name=name: numbers(shell)[name])  # type: ignore[misc]
        lines += family(f"pdplane_{name}", f"Now: {_words(name)}.", "gauge", values)
    for name in sorted({name for shell in shells for name, _ in shell.counts}):
        rows = _labelled(shells, "what", lambda shell, name=name: _counted(shell, name))  # type: ignore[misc]
        lines += family(f"pdplane_{name}_total", f"Count of {_words(name)}.", "counter", rows)
    ends = _labelled(shells, "what", lambda shell: shell.jobs.finished)
    lines += family("pdplane_finished_total", "Legs by how they ended.", "counter", ends)
    steps = _each(shells, lambda shell: shell.running_engine.steps)
    lines += family("pdplane_engine_steps_total", "Steps of the engine.", "counter", steps)
    lag_s = _each(shells, lambda shell: shell.loop_lag_s)
    lines += family("pdplane_loop_lag_seconds", "How late the control loop last woke.", "gauge", lag_s)
    first = [(_dp(shell), shell.jobs.first_token) for shell in shells]
    lines += Histogram.family("pdplane_first_token_seconds", "Leg's arrival to its first token.", first)
    whole = [(_dp(shell), shell.jobs.duration) for shell in shells]
    lines += Histogram.family("pdplane_leg_seconds", "Leg's arrival to its end.", whole)
    return "\n".join(lines) + "\n"


def pages(shell: Shell[Node]) -> dict[str, int]:
    """By state."""
    return {page.name.lower(): count for page, count in shell.node.ledger.counts.items()}


def numbers(shell: Shell[Node]) -> Mapping[str, int]:
    return {"jobs": len(shell.jobs), "in_engine": shell.running_engine.running, **shell.role_figures()}


def _summed(of_each: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in of_each:
        for name, value in one.items():
            total[name] = total.get(name, 0) + value
    return total


def _dp(shell: Shell[Node]) -> dict[str, str]:
    return {"dp": str(shell.parts.dp)}


def _each(shells: Sequence[Shell[Node]], of: Callable[[Shell[Node]], float]) -> list[Row]:
    return [(_dp(shell), of(shell)) for shell in shells]


def _labelled(shells: Sequence[Shell[Node]], label: str, of: Callable[[Shell[Node]], Mapping[str, float]]) -> list[Row]:
    return [({label: key, **_dp(shell)}, value) for shell in shells for key, value in sorted(of(shell).items())]


def _counted(shell: Shell[Node], name: str) -> dict[str, float]:
    return {label: count for (of, label), count in shell.counts.items() if of == name}


def _words(name: str) -> str:
    return name.replace("_", " ")
