"""Writes the pages that follow from the code: the state tables with their diagrams, and every setting.

usage: python docs/generate.py [--check]   (--check: exit 1 where a page is not what the code says)
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from pdplane.cli.http import ADMIN_KEY, API_KEY
from pdplane.cli.up import UpConfig
from pdplane.core.params.table import HOLDER, READER
from pdplane.core.rooms.table import RECEIVER, SENDER
from pdplane.registry.server import RegistryConfig
from pdplane.router.config import RouterConfig
from pdplane.settings import env_of, flag_of
from pdplane.worker.config import WorkerConfig

HERE = Path(__file__).parent
Table = Mapping[tuple[StrEnum, StrEnum], tuple[StrEnum, tuple[StrEnum, ...]]]


def states_page() -> str:
    return "\n".join(
        [
            "# The state tables of both dialects",
            "",
            "Written from `core/rooms/table.py` and `core/params/table.py` by `make docs`; change it there.",
            "A missing cell counts the event as late and changes nothing. The words: [protocol.md](protocol.md) and",
            "[params.md](params.md).",
            "",
            "## Rooms, decode: the receiver, one per room",
            "",
            *_diagram(RECEIVER),
            *_rows(RECEIVER),
            "## Rooms, prefill: the sender, one per room",
            "",
            *_diagram(SENDER),
            *_rows(SENDER),
            "## Params, prefill: the holder, one per hold",
            "",
            *_diagram(HOLDER),
            *_rows(HOLDER),
            "## Params, decode: the reader, one per load",
            "",
            *_diagram(READER),
            *_rows(READER),
        ]
    )


def _diagram(table: Table) -> Iterable[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    edges: dict[tuple[str, str], list[str]] = {}
    for (state, event), (following, _) in table.items():
        if state != following:
            edges.setdefault((state, following), []).append(event)
    for (state, following), events in edges.items():
        yield f"    {state} --> {following}: {', '.join(events)}"
    yield "```"
    yield ""


def _rows(table: Table) -> Iterable[str]:
    yield "| state | event | next | actions, in order |"
    yield "|---|---|---|---|"
    for (state, event), (following, actions) in sorted(table.items(), key=lambda cell: _order(table, cell[0][0])):
        shown = "same" if state == following else following
        yield f"| {state} | {event} | {shown} | {'; '.join(actions)} |"
    yield ""


def _order(table: Table, state: StrEnum) -> int:
    return list(type(state)).index(state)


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "Written from the config classes by `make docs`. Each is a flag, or an environment variable that",
        "the flag overrides.",
        "",
    ]
    parts = (
        ("pdplane up", UpConfig),
        ("pdplane worker", WorkerConfig),
        ("pdplane router", RouterConfig),
        ("pdplane registry", RegistryConfig),
    )
    for command, config in parts:
        lines += [f"## `{command}`", "", "| flag | environment | default | what it is |", "|---|---|---|---|"]
        for field in dataclasses.fields(config):
            default = "none" if field.default in ("", (), None) else f"`{field.default}`"
            choices = field.metadata.get("choices")
            what = field.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
            what = what.replace("|", "\\|")
            lines.append(f"| `{flag_of(field.name)}` | `{env_of(config, field.name)}` | {default} | {what} |")
        lines.append("")
    lines += [
        "## The commands that ask a running fleet",
        "",
        "Their flags are in each one's `--help`; two secrets may come from the environment.",
        "",
        "| flag | environment | commands |",
        "|---|---|---|",
        f"| `--api-key` | `{API_KEY}` | `pdplane status`, `chat`, `explain` |",
        f"| `--admin-key` | `{ADMIN_KEY}` | `pdplane drain`, `release` |",
        "",
    ]
    return "\n".join(lines)


PAGES = {"states.md": states_page, "settings.md": settings_page}


def stale() -> list[str]:
    """Names of pages that differ from what the code says now."""
    return [
        name
        for name, page in PAGES.items()
        if not (HERE / name).exists() or (HERE / name).read_text(encoding="utf-8") != page()
    ]


def main() -> int:
    if "--check" in sys.argv[1:]:
        for name in stale():
            print(f"docs/{name} is not what the code says: run `make docs`")
        return 1 if stale() else 0
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
