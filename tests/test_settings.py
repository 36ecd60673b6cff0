"""Settings: flags over environment over defaults, and errors that name setting, value and remedy."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import pytest

from pdplane.settings import BadSetting, add_arguments, effective, env_of, flag_of, load, setting


@dataclass(frozen=True)
class GateConfig:
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port; 100% free", metavar="PORT")
    rate: float = setting(1.5, "requests per second")
    policy: str = setting("least-load", "who gets the next request", choices=("least-load", "round-robin"))
    strict: bool = setting(False, "refuse instead of falling back")
    prefill: tuple[str, ...] = setting((), "address of a prefill; repeat for more")
    limit: int | None = setting(None, "at most so many")
    api_key: str = setting("", "secret of the clients", secret=True)


def parse(*argv: str, env: dict[str, str] | None = None) -> GateConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser, GateConfig)
    return load(GateConfig, vars(parser.parse_args(argv)), env or {})


def test_without_anything_the_defaults_hold() -> None:
    assert parse() == GateConfig()


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    env = {"PDPLANE_GATE_PORT": "9000", "PDPLANE_GATE_HOST": "::"}
    assert parse(env=env).port == 9000
    config = parse("--port", "9001", env=env)
    assert (config.port, config.host) == (9001, "::")


def test_names_of_flags_and_variables() -> None:
    assert flag_of("api_key") == "--api-key"
    assert env_of(GateConfig, "api_key") == "PDPLANE_GATE_API_KEY"


def test_a_tuple_is_a_repeated_flag_or_a_list_with_commas() -> None:
    assert parse("--prefill", "a", "--prefill", "b").prefill == ("a", "b")
    assert parse(env={"PDPLANE_GATE_PREFILL": "a,b"}).prefill == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "strict"), [((), False), (("--strict",), True), (("--no-strict",), False)], ids=["none", "yes", "no"]
)
def test_a_switch(argv: tuple[str, ...], strict: bool) -> None:
    assert parse(*argv).strict is strict


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("off", False), ("", False)]
)
def test_a_switch_in_the_environment(text: str, value: bool) -> None:
    assert parse(env={"PDPLANE_GATE_STRICT": text}).strict is value


def test_an_optional_number() -> None:
    assert parse().limit is None
    assert parse("--limit", "3").limit == 3


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PDPLANE_GATE_PORT": "many"}, ["PDPLANE_GATE_PORT", "'many'", "number"]),
        ({"PDPLANE_GATE_RATE": "fast"}, ["PDPLANE_GATE_RATE", "'fast'", "number"]),
        ({"PDPLANE_GATE_STRICT": "maybe"}, ["PDPLANE_GATE_STRICT", "'maybe'", "1 or 0"]),
        ({"PDPLANE_GATE_POLICY": "random"}, ["PDPLANE_GATE_POLICY", "'random'", "least-load, round-robin"]),
    ],
)
def test_a_bad_value_in_the_environment_is_named_with_the_remedy(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(BadSetting) as raised:
        parse(env=env)
    assert all(word in str(raised.value) for word in words)


def test_a_bad_flag_is_named_with_the_remedy() -> None:
    with pytest.raises(BadSetting, match=r"--port: 'x' is not a number"):
        parse("--port", "x")


def test_a_choice_that_is_none_ends_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--policy", "random")
    assert "least-load" in capsys.readouterr().err


def test_help_tells_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    for words in ("--port PORT", "100% free [8000]", "[127.0.0.1]", "--no-strict", "at most so many [none]"):
        assert words in shown


def test_secrets_are_never_printed() -> None:
    shown = effective(parse("--api-key", "hunter2", "--prefill", "a"))
    assert "hunter2" not in shown
    assert "api_key = ***" in shown
    assert "prefill = a" in shown
    assert "limit = none" in shown
    assert "api_key = none" in effective(parse())


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPLANE_GATE_PORT", "9123")
    given: dict[str, Any] = {}
    assert load(GateConfig, given).port == 9123


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(BadSetting, match=f"--port: {port} is no port; give one from 0 to 65535"):
        parse("--port", port)
