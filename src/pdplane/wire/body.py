"""JSON bodies of the HTTP edges: decoded strictly, and refused with an error that names the field.

Fields that nobody knows are ignored, as OpenAI's clients and the field's routers rely on; a field that is known and not
served is refused unless its value asks for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from pdplane.core.errors import Refused, bad_request

T = TypeVar("T")

NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises over bytes that are no JSON, or not of the wanted kind."""

DEEP = 256  # brackets: with fewer of them nothing comes near the stack's limit
HEADROOM = 100  # frames

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


def invalid(message: str, param: str, *, code: str = "invalid_value") -> Refused:
    """The 400 that a bad value gets; raise it."""
    return Refused(bad_request(message, code=code, param=param))


def read_with_headroom(read: Callable[[bytes], T], raw: bytes) -> T:
    """`read(raw)`, with frames of the stack to spare: whoever reads, shows or writes it later may stand deeper in the
    stack, and what is nested too deep for that is a RecursionError here and not there."""
    return read(raw) if raw.count(b"[") + raw.count(b"{") < DEEP else _deeper(read, raw, HEADROOM)


def _deeper(read: Callable[[bytes], T], raw: bytes, frames: int) -> T:
    return _deeper(read, raw, frames - 1) if frames else read(raw)


def decode_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`. Raises Refused (400) for anything else."""
    try:
        value = read_with_headroom(msgspec.json.decode, body)
    except NOT_JSON as error:
        raise Refused(bad_request(f"the request body is not valid JSON: {error}", code="invalid_json")) from None
    if not isinstance(value, dict):
        raise Refused(bad_request("the request body must be a JSON object", code="invalid_json"))
    return value


def convert(raw: object, kind: type[T], at: str = "") -> T:
    """`raw` as a `kind`. Raises Refused (400) naming the field, below `at`, and both types."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), at) from None


def refuse_unsupported(raw: Mapping[str, object], neutral: Mapping[str, Sequence[object]], at: str = "") -> None:
    """Raises Refused (400) for the first field of `raw` whose value is none of its `neutral` ones; null always is."""
    for name, values in neutral.items():
        value = raw.get(name)
        if value is not None and value not in values:
            param = join(at, name)
            raise invalid(
                f"{param} is not supported by these workers; leave it out", param, code="unsupported_parameter"
            )


def join(at: str, name: str) -> str:
    """The path of field `name` below `at`."""
    if not at or not name:
        return at or name
    return f"{at}{name}" if name.startswith("[") else f"{at}.{name}"


def _type_error(text: str, at: str) -> Refused:
    found = _AT.match(text)
    what, path = (found["what"], found["path"] or "") if found else (text, "")
    missing = _MISSING.match(what)
    if missing:
        param = join(join(at, path), missing["name"])
        return invalid(f"{param} is missing", param, code="missing_required_parameter")
    param = join(at, path)
    return invalid(f"{param}: {what[:1].lower()}{what[1:]}", param, code="invalid_type")
