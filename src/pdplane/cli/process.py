"""What every server process of ours does at start: logging to stderr, uvloop where there is one, one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from pdplane import settings

_CONTROL = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


class OneLine(logging.Formatter):
    """A message is one line: it may quote what a client has sent, who must not write lines of ours. Tracebacks keep
    theirs."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROL)


def set_up_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpcore").setLevel(logging.WARNING)


def show_config(name: str, config: object) -> None:
    print(f"{name} config\n{settings.effective(config)}", flush=True)


def run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
