"""What leaves a decode of the params dialect, and when: nothing of a gated run before Ungate; then the first token, and
the end. A run that was taken back has said nothing."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdplane.core.effects import AbortEngine, AnswerFailed, Effect, RunWhole, Ungate
from pdplane.core.events import Computed, Event, Released
from pdplane.core.ids import Instance, Rid

from .checkers import Watched
from .content import Work


class _Run(msgspec.Struct):
    gated: bool
    taken_back: bool = False
    first: bool = False
    ended: bool = False
    said_first: bool = False
    said_end: bool = False


class Gates:
    """`first_byte` and `finished`: what the router hears."""

    def __init__(
        self,
        works: dict[Rid, Work],
        first_byte: Callable[[Watched, Rid], None],
        finished: Callable[[Watched, Rid], None],
    ) -> None:
        self._works = works
        self._first_byte, self._finished = first_byte, finished
        self._runs: dict[tuple[Instance, Rid], _Run] = {}

    def effect(self, who: Watched, effect: Effect) -> None:
        match effect:
            case RunWhole(rid=rid, gated=gated):
                self._runs[who.instance, rid] = _Run(gated)
            case Ungate(rid) if run := self._runs.get((who.instance, rid)):
                run.gated = False
                self._let_out(who, rid, run)
            case AbortEngine(rid) if run := self._runs.get((who.instance, rid)):
                run.taken_back = True
            case AnswerFailed(rid):
                self._runs.pop((who.instance, rid), None)
            case _:
                pass

    def event(self, who: Watched, event: Event) -> None:
        """What the engine reports, before the core has it."""
        if not isinstance(event, (Computed, Released)):
            return
        rid = event.rid
        run = self._runs.get((who.instance, rid))
        if run is None or run.taken_back:
            return
        if isinstance(event, Computed):
            run.first = run.first or event.tokens >= self._works[rid].prompt_tokens
        elif not event.error:
            run.first = run.ended = True
        self._let_out(who, rid, run)

    def _let_out(self, who: Watched, rid: Rid, run: _Run) -> None:
        if run.gated:
            return
        if run.first and not run.said_first:
            run.said_first = True
            self._first_byte(who, rid)
        if run.ended and not run.said_end:
            run.said_end = True
            self._finished(who, rid)
