"""What every server process writes: one line for each thing it has to say."""

from __future__ import annotations

import logging
import sys

from pdplane.cli.process import OneLine


def written(text: str, *args: object, fault: bool = False) -> str:
    try:
        raise ValueError("of ours")
    except ValueError:
        told = sys.exc_info() if fault else None
    record = logging.LogRecord("pdplane.x", logging.WARNING, __file__, 1, text, args, told)
    return OneLine("%(levelname)s %(name)s: %(message)s").format(record)


def test_a_client_writes_no_line_of_its_own() -> None:
    quoted = "a\n2026-01-01 WARNING pdplane: a lie\r\x00\x1b[31m\u2028"
    line = written("prefill %s is not there", quoted)
    assert line == (
        "WARNING pdplane.x: prefill a\\n2026-01-01 WARNING pdplane: a lie\\r\\x00\\x1b[31m\\u2028 is not there"
    )


def test_other_letters_stay_as_they_are() -> None:
    assert written("prompt %s", "é 中 😀") == "WARNING pdplane.x: prompt é 中 😀"


def test_a_traceback_keeps_its_lines() -> None:
    assert "Traceback" in written("a fault", fault=True).splitlines()[1]
