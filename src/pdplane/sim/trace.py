"""One line per event, in stable text: the same seed gives the same bytes. Names and numbers, no addresses."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdplane.core.effects import AnswerFailed, Count, Effect, Lane, Note, SendFrame
from pdplane.core.errors import Cause
from pdplane.core.events import Event, FrameIn
from pdplane.core.frames import Beat, Frame, Hello, PromptId, Row, Welcome
from pdplane.core.slices import Slice

_LEFT_OUT = ("rank", "page_keys")  # said by the session; as long as the prompt


class Trace:
    """Collects lines while `on`; costs one test per event while not."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.lines: list[str] = []

    def say(self, now: float, who: str, text: str) -> None:
        if self.on:
            self.lines.append(f"{now:11.6f}  {who:<9} {text}")

    def handled(self, now: float, who: str, event: Event, effects: Sequence[Effect]) -> None:
        """An event of a core, with what the core asked for in return. Beats are left out: they are most of a run."""
        if not self.on or (isinstance(event, FrameIn) and isinstance(event.frame, Beat) and not effects):
            return
        self.say(now, who, "<- " + _text(event))
        for effect in effects:
            if not (isinstance(effect, SendFrame) and isinstance(effect.frame, Beat)):
                self.say(now, who, "     -> " + _text(effect))


def _text(what: Event | Effect) -> str:
    match what:
        case FrameIn(conn, frame):
            return f"frame conn={conn} {_frame(frame)}"
        case SendFrame(conn, frame):
            return f"send conn={conn} {_frame(frame)}"
        case Note(rid, _, state, detail):
            return f"note {rid} {state}" + (f": {detail}" if detail else "")
        case Count(name, label):
            return f"count {name} {label}"
        case AnswerFailed(rid, cause):
            return f"answer {rid} failed: {cause}"
        case _:
            return _fields(what)


def _frame(frame: Frame) -> str:
    if isinstance(frame, (Hello, Welcome)):
        return f"{type(frame).__name__.upper()} {frame.src} -> {frame.dst or 'whoever listens'}"
    return _fields(frame)


def _fields(what: msgspec.Struct) -> str:
    shown = [f"{name}={_value(getattr(what, name))}" for name in what.__struct_fields__ if name not in _LEFT_OUT]
    return " ".join([type(what).__name__, *shown])


def _value(value: object) -> str:
    match value:
        case Cause():
            return value.code
        case Row():
            return f"row({value.prompt_tokens} tokens, {value.finish_reason or 'goes on'})"
        case PromptId():
            return f"prompt({value.digest.hex()[:8]}, {value.tokens} tokens)"
        case Lane():
            return f"{value.link} by {value.kind}"
        case Slice():
            return f"{value.size_bytes} B of a page"
        case float():
            return f"{value:.6f}"
        case tuple():
            return "[" + ",".join(_value(item) for item in value) + "]"
        case _:
            return str(value)
