"""Tokens into text: incremental detokenizing, and stop strings that may lie across any number of tokens.

What a stop string might still begin with is held back, so that no client ever sees a part of one. Of several stop
strings the one that is complete first wins, however the text was cut into tokens: a worker that was handed the first
token and one that sampled it end alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .engine import Tokenizer, TokenStream


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str: bool = False


class Spelling:
    """The text of one sample. After a stop string was `matched` it takes no more tokens. One that is complete before
    `min_tokens` tokens ends nothing."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, min_tokens: int = 0) -> None:
        self._min_tokens = min_tokens
        self._stream: TokenStream = tokenizer.stream(skip_special=options.skip_special_tokens)
        self._options = options
        self._held = ""
        self._count = 0
        self.matched: str | None = None

    def push(self, token: int) -> str:
        """The text that `token` makes certain, up to a stop string that it completes."""
        assert self.matched is None, "a token after the stop string"
        self._count += 1
        return self._take(self._stream.push(token))

    def end(self, last: int | None = None) -> str:
        """What is left when the sample ends without a stop string. `last` is a stop token that ended it: it is counted
        and not shown, unless the stop is to be included."""
        if last is not None and self._options.include_stop_str:
            text = self.push(last)
        else:
            text = ""
        if self.matched is None:
            text += self._take(self._stream.flush())
        if self.matched is None:
            text, self._held = text + self._held, ""
        return text

    def _take(self, text: str) -> str:
        self._held += text
        if self._count >= self._min_tokens:
            found = first_stop(self._held, self._options.stop)
            if found is not None:
                return self._cut(found)
        keep = len(self._held) - _open_end(self._held, self._options.stop)
        certain, self._held = self._held[:keep], self._held[keep:]
        return certain

    def _cut(self, found: tuple[int, str]) -> str:
        start, self.matched = found
        certain = self._held[: start + len(self.matched) * self._options.include_stop_str]
        self._held = ""
        return certain


class Spelled(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    finish: str | None
    matched_stop: str | int | None


def spell(
    tokenizer: Tokenizer, options: TextOptions, tokens: Sequence[int], ended: str | None, *, min_tokens: int = 0
) -> Spelled:
    """Text and end of a sample whose tokens are all known, such as one that ended with prefill's token. `ended` is what
    the engine said of the last token ("stop", "length" or None); a stop string in the text comes before it."""
    spelling = Spelling(tokenizer, options, min_tokens)
    shown = tokens[:-1] if ended == "stop" else tokens
    text = ""
    for token in shown:
        text += spelling.push(token)
        if spelling.matched is not None:
            return Spelled(text=text, finish="stop", matched_stop=spelling.matched)
    last = tokens[-1] if ended == "stop" and tokens else None
    if ended is not None:
        text += spelling.end(last)
    if spelling.matched is not None:
        return Spelled(text=text, finish="stop", matched_stop=spelling.matched)
    return Spelled(text=text, finish=ended, matched_stop=last)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(start, stop) of the stop string that is complete first in `text`; of those that end together, the longest."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
            best = (start + len(stop), start, stop)
    return None if best is None else best[1:]


def _open_end(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` with which some stop string begins."""
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
