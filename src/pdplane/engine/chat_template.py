"""A model's chat template, rendered in a jinja2 sandbox with the settings that templates are written for."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .config import read_json

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """The template of `chat_template.jinja` or of tokenizer_config.json; without one, `render` says so."""

    def __init__(self, folder: Path) -> None:
        config = folder / "tokenizer_config.json"
        settings = read_json(config) if config.exists() else {}
        self._folder = folder
        self._source = _source(folder, settings)
        self._tokens = {name: _content(settings[name]) for name in _NAMED_TOKENS if settings.get(name)}
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now

    def render(self, messages: Sequence[dict[str, object]], add_generation_prompt: bool) -> str:
        """The text of the conversation. Raises ValueError with the template's own message."""
        if self._source is None:
            raise ValueError(f"{self._folder.name} has no chat template; use /v1/completions")
        try:
            template = self._environment.from_string(self._source)
            return template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, tools=None, **self._tokens
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error


def _source(folder: Path, settings: dict[str, Any]) -> str | None:
    alone = folder / "chat_template.jinja"
    if alone.exists():
        return alone.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _content(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
