"""One way to configure: a frozen dataclass whose fields carry help; flags, environment and print-out follow from it.

``PDPLANE_<COMMAND>_<FIELD>`` in the environment sets a default (PDPLANE_ROUTER_PORT for RouterConfig.port), a flag
overrides it; a repeatable one takes a comma-separated list there. Secrets are never printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


class BadSetting(ValueError):
    """A setting has a value it cannot have; the message names setting, value and remedy."""


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    secret: bool = False,
    metavar: str | None = None,
) -> Any:
    """A configurable field. A tuple default makes the flag repeatable; a bool makes it a switch."""
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "secret": secret, "metavar": metavar}
    )


def flag_of(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def check_token(field_name: str, value: str) -> None:
    """What goes into a header is printable ASCII. Raises BadSetting, which does not show the value."""
    if not (value.isascii() and value.isprintable()):
        raise BadSetting(f"{flag_of(field_name)} has characters beyond printable ASCII; give letters, digits and signs")


def env_of(config: type[Any], field_name: str) -> str:
    command = config.__name__.removesuffix("Config").upper()
    return f"PDPLANE_{command}_{field_name.upper()}"


def add_arguments(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Adds a flag for every field of the dataclass `config`."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        meta = field.metadata
        kind = _scalar(hints[field.name])
        shown = f"{meta['help']} [{_show(field.default)}]"
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": shown.replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = meta["metavar"] or (None if meta["choices"] else kind.__name__.upper())
            options["choices"] = meta["choices"]
            if isinstance(field.default, tuple):
                options["action"] = "append"
        parser.add_argument(flag_of(field.name), **options)


def load(config: type[T], given: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> T:
    """The effective config: `given` (flags) over environment over defaults. Raises BadSetting."""
    given = given or {}
    env = os.environ if env is None else env
    hints = typing.get_type_hints(config)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        kind, many = _scalar(hints[field.name]), isinstance(field.default, tuple)
        if field.name in given:
            raw, origin = given[field.name], flag_of(field.name)
        elif (variable := env_of(config, field.name)) in env:
            raw, origin = env[variable], variable
            raw = raw.split(",") if many else raw
        else:
            continue
        read = [_read(kind, item, origin, field.metadata["choices"]) for item in (raw if many else [raw])]
        for value in read:
            _check_number(field.name, value, origin)
        values[field.name] = tuple(read) if many else read[0]
    return config(**values)


def effective(config: Any) -> str:
    """The config as `name = value` lines, secrets masked: what a server prints when it starts."""
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        shown = "***" if field.metadata.get("secret") and value else _show(value)
        lines.append(f"  {field.name} = {shown}")
    return "\n".join(lines)


def _scalar(hint: Any) -> type[Any]:
    """The scalar type behind ``X``, ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return typing.cast("type[Any]", hint)


def _read(kind: type[Any], raw: Any, origin: str, choices: Sequence[str] | None) -> Any:
    if kind is bool:
        text = str(raw).lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise BadSetting(f"{origin}: {raw!r} is not a yes or no; give 1 or 0")
    try:
        value = kind(raw)
    except (TypeError, ValueError):
        raise BadSetting(f"{origin}: {raw!r} is not a {'number' if kind in (int, float) else kind.__name__}") from None
    if choices and value not in choices:
        raise BadSetting(f"{origin}: {value!r} is not one of {', '.join(choices)}")
    return value


def _check_number(name: str, value: object, origin: str) -> None:
    """Every setting that is called a port is one (some event loops take a larger number for another port); and none is
    negative, endless or not a number."""
    if not isinstance(value, (int, float)):
        return
    if name.split("_")[-1] == "port" and not 0 <= value <= 65535:
        raise BadSetting(f"{origin}: {value} is no port; give one from 0 to 65535")
    if not 0 <= value < math.inf:
        raise BadSetting(f"{origin}: {value} is negative, endless or not a number; give one from 0 upwards")


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value) or "none"
    return "none" if value is None or value == "" else str(value)
