"""One answer made of several: each sample's own, in the order of prompts and then of choices.

A sample's answer says choice 0 and an id of its own; the client's has one id and an index per sample. Usage is summed
as for one request: a prompt's tokens count once, however many choices it has.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from pdplane.wire.body import NOT_JSON

Fields = dict[str, msgspec.Raw]
Usage = dict[str, Any]

_EVENT_END = b"\n\n"
_fields = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])
_usage = msgspec.json.Decoder(Usage | None)
_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")


class SampleFailed(Exception):
    """A sample's answer turned out to be an error after it had begun; the message is the worker's."""


class Merger(Protocol):
    def feed(self, sample: int, data: bytes) -> bytes:
        """The next bytes of a sample's body; what the client is to get of them now. Raises SampleFailed."""
        ...

    def closing(self) -> bytes:
        """What remains once every sample's answer is complete. Raises SampleFailed: one of them cannot be read."""
        ...


class MergedBody:
    """Whole answers to a whole answer. `per_prompt`: choices of each prompt."""

    def __init__(self, samples: int, per_prompt: int, answer_id: str) -> None:
        self._parts: list[list[bytes]] = [[] for _ in range(samples)]
        self._per_prompt = per_prompt
        self._id = answer_id

    def feed(self, sample: int, data: bytes) -> bytes:
        self._parts[sample].append(data)
        return b""

    def closing(self) -> bytes:
        try:
            return self._merged([_fields.decode(b"".join(parts)) for parts in self._parts])
        except (*NOT_JSON, TypeError) as error:
            raise SampleFailed(f"a sample's answer cannot be read: {error}") from None

    def _merged(self, answers: list[Fields]) -> bytes:
        choices: list[Fields] = []
        for sample, answer in enumerate(answers):
            choices += numbered(answer.get("choices", msgspec.Raw(b"[]")), sample)
        merged: dict[str, Any] = dict(answers[0])
        merged["id"] = self._id
        merged["choices"] = choices
        usages = [_usage.decode(answer.get("usage", _NULL)) for answer in answers]
        if any(usages):
            merged["usage"] = summed(usages, self._per_prompt)
        return _encode(merged)


class MergedStream:
    """Events as they come, each sample's in its order; the usage once, and one [DONE]."""

    def __init__(self, samples: int, per_prompt: int, answer_id: str) -> None:
        self._rest = [b""] * samples  # of each sample, an event that is not here in full
        self._usages: list[Usage | None] = [None] * samples
        self._last: Fields = {}  # of the events that told a usage
        self._per_prompt = per_prompt
        self._id = msgspec.Raw(_encode(answer_id))

    def feed(self, sample: int, data: bytes) -> bytes:
        *events, self._rest[sample] = (self._rest[sample] + data).split(_EVENT_END)
        return b"".join([self._rewritten(sample, event) for event in events])

    def _rewritten(self, sample: int, event: bytes) -> bytes:
        name, _, data = event.partition(b":")
        data = data.strip()
        if name.strip() != b"data":
            return event + _EVENT_END if event.strip() else b""
        if data == b"[DONE]":
            return b""
        try:
            fields = _fields.decode(data)
            choices = numbered(fields.get("choices", _NULL), sample) if "choices" in fields else []
            usage = None if choices else _usage.decode(fields.get("usage", _NULL))
        except NOT_JSON:
            raise SampleFailed(f"sample {sample} streams what is no chunk: {data[:80]!r}") from None
        if bytes(fields.get("error", _NULL)) != b"null":
            raise SampleFailed(_message_of(fields["error"], sample))
        if not choices:
            self._usages[sample] = usage
            self._last = fields
            return b""
        return _event(fields | {"id": self._id, "choices": msgspec.Raw(_encode(choices))})

    def closing(self) -> bytes:
        done = b"data: [DONE]" + _EVENT_END
        if not any(self._usages):
            return done
        usage = msgspec.Raw(_encode(summed(self._usages, self._per_prompt)))
        return _event(self._last | {"id": self._id, "choices": msgspec.Raw(b"[]"), "usage": usage}) + done


def numbered(choices: msgspec.Raw, sample: int) -> list[Fields]:
    """The choices of one sample, of which there is one, under its index in the whole."""
    index = msgspec.Raw(str(sample).encode())
    return [choice | {"index": index} for choice in _choices.decode(choices)]


def summed(usages: list[Usage | None], per_prompt: int) -> Usage:
    """Of samples in prompt-major order. What is no number in all of them is left out."""
    prompts = [usage or {} for usage in usages[::per_prompt]]
    every = [usage or {} for usage in usages]
    total: Usage = {
        "prompt_tokens": _sum(prompts, "prompt_tokens"),
        "completion_tokens": _sum(every, "completion_tokens"),
    }
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    for name, counted in (("prompt_tokens_details", prompts), ("completion_tokens_details", every)):
        details = [usage[name] for usage in counted if isinstance(usage.get(name), dict)]
        if details:
            total[name] = {key: _sum(details, key) for key in details[0] if isinstance(details[0][key], int)}
    return total


def _sum(counted: list[Usage], name: str) -> int:
    return sum(value for usage in counted if isinstance(value := usage.get(name), int))


def _event(fields: Fields) -> bytes:
    return b"data: " + _encode(fields) + _EVENT_END


class _Error(msgspec.Struct):
    message: str = ""


def _message_of(error: msgspec.Raw, sample: int) -> str:
    try:
        told = msgspec.json.decode(error, type=_Error).message
    except NOT_JSON:
        told = ""
    return f"sample {sample} broke off its answer: {told or 'no reason given'}"
