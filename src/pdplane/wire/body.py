"""JSON bodies of the HTTP edges: decoded strictly, and refused with an error that names the field.

Fields that nobody knows are ignored, as OpenAI's clients and the field's routers rely on; a field that is known and not
served is refused unless its value asks for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from pdplane.core.errors import Refused, bad_request

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


def invalid(message: str, param: str, *, code: str = "invalid_value") -> Refused:
    """The 400 that a bad value gets; raise it."""
    return Refused(bad_request(message, code=code, param=param))


def decode_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`. Raises Refused (400) for anything else."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
