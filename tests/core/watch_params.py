"""What no schedule may lead to, watched from outside the nodes.

A prompt is the head of a text, so that prompts share prefixes; every page remembers of which text it holds what, as
prefill's engine writes it, a move copies it and decode's engine writes it. Whatever runs, and may be answered, must
have found in its pages what it was told is there; from nobody's hold but one that was confirmed to it; and every
request has one answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdplane.core.effects import (
    AnswerFailed,
    AnswerHeld,
    ArmGrant,
    Effect,
    ExtendPages,
    RestoreEngine,
    RetractEngine,
    RunPrefill,
    RunWhole,
    SendFrame,
    Ungate,
)
from pdplane.core.events import Handle
from pdplane.core.frames import Confirmed, PromptId
from pdplane.core.ids import GrantNo, HoldNo, Instance, PageId, Rank, Rid

from .facing import PAGE, Box
from .facing_params import FacingParams, answers


class Text(NamedTuple):
    """A prompt: the first `tokens` tokens of a text."""

    name: str
    tokens: int

    @property
    def id(self) -> PromptId:
        return PromptId(f"{self.name}/{self.tokens}".encode(), self.tokens)

    def page(self, at: int) -> tuple[str, int, int]:
        """What its page number `at` holds: of which text, which page, how many tokens."""
        return self.name, at, min(PAGE, self.tokens - at * PAGE)


NOTHING = ("", 0, 0)
Part = tuple[Rank, Rank] | None  # of a page: what one link brings; None: all of it


class Pages:
    """What the pages of all pools hold."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, PageId], dict[Part, tuple[str, int, int]]] = {}

    def write(self, box: Box, page: PageId, content: tuple[str, int, int]) -> None:
        self._held[id(box), page] = {None: content}

    def expect(self, box: Box, page: PageId, parts: list[Part]) -> None:
        """It is armed: every link is to bring its part."""
        self._held[id(box), page] = dict.fromkeys(parts, NOTHING)

    def copy(self, source: tuple[Box, PageId], to: tuple[Box, PageId], part: Part) -> None:
        (found,) = self._held[id(source[0]), source[1]].values()
        self._held[id(to[0]), to[1]][part] = found

    def fault(self, box: Box, page: PageId, wanted: tuple[str, int, int]) -> str:
        """Why this page is not what somebody takes it for; "" where it is."""
        found = self._held.get((id(box), page), {})
        good = bool(found) and all(have[:2] == wanted[:2] and have[2] >= wanted[2] for have in found.values())
        return "" if good else f"page {page} holds {found}, and not {wanted}"


class Watch:
    """`faults`: what has been met that must never be."""

    def __init__(self, world: FacingParams) -> None:
        self.world = world
        self.pages = Pages()
        self.handles: list[Handle] = []  # answered so far
        self.texts: dict[str, Text] = {}  # by rid, as the three below
        self.of_rid: dict[str, Handle] = {}
        self.arrivals: dict[str, int] = {}
        self.lost: set[str] = set()  # of processes that died
        self.ended: set[str] = set()  # by decode's engine, well
        self.finished: set[str] = set()  # and nothing of the answer is kept back any more
        self.answered: set[str] = set()  # bytes of it may leave
        self.wrong: dict[str, list[str]] = {}  # what was wrong in its pages when somebody last looked
        self.faults: list[str] = []
        self._seen: dict[int, int] = {}

    def ends(self, box: Box, run: RunWhole, *, well: bool, cut: bool) -> None:
        """Decode's engine is about to let go of this run. `cut`: not at an end of its own."""
        if not cut:
            self._check(box, run)
            if run.rid in self.answered:
                self._blame(run)
        if well:
            self.ended.add(run.rid)

    def look(self) -> None:
        """What was asked for since the last look."""
        for box in self.world.boxes:
            start = self._seen.get(id(box), 0)
            self._seen[id(box)] = len(box.log)
            for effect in box.log[start:]:
                self._looked_at(box, effect)

    def _looked_at(self, box: Box, effect: Effect) -> None:
        match effect:
            case AnswerHeld(rid=rid):
                self.handles.append(self._handle(box, effect))
            case RunPrefill(rid=rid, pages=pages, cached_tokens=cached):
                for at, page in list(enumerate(pages))[cached // PAGE :]:
                    self.pages.write(box, page, self.texts[rid].page(at))
            case RunWhole(rid=rid):
                self._begins(box, effect)
            case ExtendPages(pages=pages):
                for page in pages:
                    self.pages.write(box, page, ("answer", 0, 0))
            case ArmGrant(pages=pages, lanes=lanes):
                for page in pages:
                    self.pages.expect(box, page, [(lane.link.here, lane.link.there.rank) for lane in lanes])
            case RetractEngine(rid=rid, pages=pages):
                self._look_at(box, rid, pages)
            case RestoreEngine(rid=rid, pages=pages):
                text, good = self.texts[rid], not self.wrong[rid]
                for at, page in enumerate(pages):
                    self.pages.write(box, page, text.page(at) if good and at * PAGE < text.tokens else NOTHING)
            case Ungate(rid=rid):
                run = next(e for e in reversed(box.log) if isinstance(e, RunWhole) and e.rid == rid)
                self._answers(box, run)
                self.is_finished(box, rid)
            case AnswerFailed(rid=rid) if rid in self.finished and self._own(effect):
                self.faults.append(f"{rid} was answered whole, and then {effect.cause}")
            case _:
                pass

    def _handle(self, box: Box, held: AnswerHeld) -> Handle:
        self.world.p, current = box, self.world.p
        handle = self.world.handle(int(held.rid[1:]))
        self.world.p = current
        return handle

    def _begins(self, box: Box, run: RunWhole) -> None:
        """What it computes itself is as it should be. Where it has begun before, nothing of that counts."""
        self.ended.discard(run.rid)
        text = self.texts[run.rid]
        for at, page in enumerate(run.pages):
            if at * PAGE >= run.computed or at * PAGE + text.page(at)[2] > run.computed:
                self.pages.write(box, page, text.page(at))
        if not run.gated:
            self._answers(box, run)

    def _answers(self, box: Box, run: RunWhole) -> None:
        """From here on bytes of its answer may leave."""
        self._check(box, run)
        self.answered.add(run.rid)
        self._blame(run)
        handle, text = self.of_rid.get(run.rid), self.texts[run.rid]
        read = handle and run.computed > run.shared * PAGE
        if handle and read and not self._confirmed(box, handle):
            self.faults.append(f"{run.rid} of {text} is answered from {handle.hold}, which nobody has confirmed to it")

    def _blame(self, run: RunWhole) -> None:
        self.faults += [f"{run.rid} of {self.texts[run.rid]}: {fault}" for fault in self.wrong.get(run.rid, ())]

    def is_finished(self, box: Box, rid: Rid) -> None:
        """All of its answer has left."""
        if rid in self.ended and rid not in box.node.requests:  # type: ignore[attr-defined]
            self.finished.add(rid)

    def _check(self, box: Box, run: RunWhole) -> None:
        """What is wrong counts when it is answered: it may be refused yet."""
        aside = any(isinstance(effect, RetractEngine) and effect.rid == run.rid for effect in box.log)
        if run.rid in box.node.batch.running and not aside:  # type: ignore[attr-defined]
            self._look_at(box, run.rid, run.pages)

    def _look_at(self, box: Box, rid: Rid, pages: Sequence[PageId]) -> None:
        text = self.texts[rid]
        prompt = enumerate(pages[: -(-text.tokens // PAGE)])
        self.wrong[rid] = [fault for at, page in prompt if (fault := self.pages.fault(box, page, text.page(at)))]

    def _confirmed(self, box: Box, handle: Handle) -> bool:
        here = box.node.instance  # type: ignore[attr-defined]
        said = (c for b in self.world.everybody for c in b.sent(Confirmed) if c.src == handle.instance)
        return any(c.hold == handle.hold and c.dst == here and c.refusal is None for c in said)

    def verdicts(self) -> list[str]:
        """Requests that were not answered exactly once each."""
        bad = list(self.faults)
        for rid, arrivals in self.arrivals.items():
            if rid in self.lost:
                continue
            said = [answer for box in self.world.everybody for answer in answers(box, rid)]
            well = rid in self.ended and not any(e for e in said if isinstance(e, AnswerFailed) and self._own(e))
            if len(said) + well != arrivals:
                bad.append(f"{rid} came {arrivals} times and was answered {said} {'and well' if well else ''}")
        told = [e.frame for box in self.world.everybody for e in box.all(SendFrame) if isinstance(e.frame, Confirmed)]
        consumers: dict[tuple[Instance, HoldNo], set[tuple[Instance, GrantNo]]] = {}
        for frame in told:
            if frame.refusal is None:
                consumers.setdefault((frame.src, frame.hold), set()).add((frame.dst, frame.grant))
        return bad + [f"{hold} has the consumers {who}" for hold, who in consumers.items() if len(who) > 1]

    @staticmethod
    def _own(answer: AnswerFailed) -> bool:
        """Not a newcomer's, whose rid was in use."""
        return answer.cause.code != "duplicate_rid"
