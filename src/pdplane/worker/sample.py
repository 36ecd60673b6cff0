"""One sample as the engine's thread knows it: the engine's outputs go in, what its owner is told comes out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdplane.core.ids import Rid

from .engine import EngineRequest, StepOutput, Token
from .host_copy import HostCopy
from .text import Spelling


class Emission(msgspec.Struct, kw_only=True):
    """What one turn did for one request. `computed`: tokens whose KV is in the pages. `finish`, given at most once:
    "stop" | "length" | "abort" | "error" (with `error`). `ended`: the real end of a prefill_only request.
    `matched_stop`: the stop string or stop token. `released`: the engine touches the request's pages no more.
    `retracted`: nor does it until they are restored; the KV of so many tokens is in host memory."""

    rid: Rid
    computed: int = 0
    tokens: list[Token] = []
    text: str = ""
    finish: str | None = None
    ended: str | None = None
    matched_stop: str | int | None = None
    error: str = ""
    released: bool = False
    retracted: int | None = None


class Sample(msgspec.Struct):
    """`finished`: its end is said, though the engine may still be at work on it. `host`: its KV while retracted."""

    spelling: Spelling
    computed: int
    prefill_only: bool
    finished: bool = False
    host: HostCopy | None = None

    def open(self, request: EngineRequest, prior: Sequence[Token]) -> Emission:
        """The tokens that came with the hand-off. A stop string that they complete ends the request before the engine
        has seen it."""
        opening = Emission(rid=request.rid, computed=request.computed, tokens=list(prior))
        for token in prior:
            opening.text += self.spelling.push(token.id)
            if self.spelling.matched is not None:
                opening.finish, opening.matched_stop, self.finished = "stop", self.spelling.matched, True
                break
        return opening

    def spell(self, output: StepOutput) -> Emission:
        """The output with its text. An end brings what was held back."""
        emission = Emission(
            rid=output.rid, computed=output.computed, finish=output.finish, ended=output.ended, error=output.error
        )
        end = output.ended or output.finish
        if output.token is not None:
            emission.tokens = [output.token]
            if end != "stop":
                emission.text = self.spelling.push(output.token.id)
        over = output.ended if self.prefill_only else output.finish  # a handed-off sample's text goes on elsewhere
        if self.spelling.matched is None and over is not None:
            last = output.token.id if output.token is not None and end == "stop" else None
            emission.text += self.spelling.end(last)
            emission.matched_stop = last
        if self.spelling.matched is not None:
            self._stop_by_text(emission)
        self.finished = emission.finish is not None
        return emission

    def _stop_by_text(self, emission: Emission) -> None:
        """A stop string ends a sample. A prefill_only request finishes as it does, and reports it as its real end."""
        emission.matched_stop = self.spelling.matched
        if self.prefill_only:
            emission.ended = "stop"
        elif emission.finish not in ("abort", "error"):
            emission.finish = "stop"
