"""The tables at the end: native vLLM and our workers side by side."""

from __future__ import annotations

import dataclasses
import os

from added_time import HEAD, TITLE, Added
from leaving import Back
from rows import Rows, lines_of

LEFT_WIDTHS = (28, 30, 48, 48)
DIED_WIDTHS = (44, 58, 58)


@dataclasses.dataclass
class Measured:
    """`left`: by engine and phase, (prefill, decode). `died`: by engine, what came of what was tried."""

    parts: list[Rows] = dataclasses.field(default_factory=list)
    added: list[Added] = dataclasses.field(default_factory=list)
    left: dict[str, dict[str, tuple[Back, Back]]] = dataclasses.field(default_factory=dict)
    died: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(part.failed for part in self.parts)

    def __str__(self) -> str:
        tables = (self._added(), self._left(), self._died(), [part.sum_up() for part in self.parts])
        return "\n\n".join("\n".join(table) for table in tables if table)

    def _added(self) -> list[str]:
        title = "What the hand-off adds: medians over prompts without a stall; added: of each prompt's difference"
        return [title, TITLE, HEAD, *map(str, self.added)] if self.added else []

    def _left(self) -> list[str]:
        shown = [
            line
            for who, phases in self.left.items()
            for phase, (prefill, decode) in phases.items()
            for line in lines_of((who, phase, f"prefill: {prefill}", f"decode: {decode}"), LEFT_WIDTHS)
        ]
        return ["Blocks of a request whose client leaves", *shown] if shown else []

    def _died(self) -> list[str]:
        tried = dict.fromkeys(one for seen in self.died.values() for one in seen)
        shown = list(lines_of(("", *self.died), DIED_WIDTHS))
        for one in tried:
            shown += lines_of((one, *(seen.get(one, "-") for seen in self.died.values())), DIED_WIDTHS)
        return ["Lies and deaths", *shown] if tried else []


def load() -> str:
    """Of the machine: its figures mean little where others work on it too."""
    return f"load average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"
