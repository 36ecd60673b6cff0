"""Every command explains itself, and says what to mend where it cannot run."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdplane.cli.main import main, parser
from tests.engine.tiny import write_checkpoint

ROOT = Path(__file__).parent.parent.parent

FLAGS = {
    "up": ["--prefill", "--decode", "--model", "--port", "--dp", "--tp", "--prefill-dp", "--decode-tp", "--transport"],
    "worker": [
        *("--role", "--model", "--port", "--bootstrap-port", "--control-port", "--data-port", "--pool-mb"),
        *("--dp", "--tp", "--cp", "--pp", "--decode-allocation-policy", "--load-balance-method", "--transport"),
        *("--checksum", "--hold-term-s", "--held-pages", "--prefix-cache", "--no-prefix-cache", "--reserve-tokens"),
        *("--admin-key", "--allow-insecure", "--secret", "num_reserved_decode_tokens"),
    ],
    "router": ["--prefill", "--decode", "--worker", "--policy", "--port", "--api-key"],
    "registry": ["--host", "--port"],
    "model": ["install"],
    "status": ["--url", "--json"],
    "chat": ["--url", "--max-tokens"],
    "explain": ["--url", "--json", "id"],
    "drain": ["URL", "--reason", "--admin-key"],
    "release": ["URL", "--instance", "--grant", "--admin-key"],
    "sim": ["--seeds", "--dialect"],
    "incidents": ["NUMBER"],
    "replay": ["seed", "--pattern"],
}
TARGETS = (
    "serve test sim bench-equality bench-cancel bench-engine bench-handoff bench-router bench-registry bench-transport "
    "interop-sglang trial-kill trial-drain trial-transfer trial-field docs"
)


@pytest.fixture(autouse=True)
def no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home in which nothing is installed."""
    monkeypatch.setenv("PDPLANE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that somebody listens on."""
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield str(sock.getsockname()[1])


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    """What a command that cannot run says on stderr."""
    assert main(argv) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("command", FLAGS)
def test_help_names_every_flag_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    help = capsys.readouterr().out
    assert all(flag in help for flag in FLAGS[command])
    assert len(help.splitlines()) > 4


def test_help_of_the_doors_says_what_holds_beyond_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    for command, words in (("router", ["--api-key", "abort_all", "403"]), ("registry", ["--allow-insecure"])):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        intro = capsys.readouterr().out.partition("options:")[0].partition("Beyond loopback")[2]
        assert all(word in intro for word in words), intro


def test_help_without_a_command_names_every_command_and_the_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    help = capsys.readouterr().out
    assert all(command in help for command in FLAGS)
    assert "pdplane model install" in help
    assert set(parser()._subparsers._group_actions[0].choices or ()) == set(FLAGS)  # type: ignore[union-attr]


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "pdplane", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pdplane ")


@pytest.mark.parametrize("target", TARGETS.split())
def test_every_make_target_is_there(target: str) -> None:
    targets = " ".join(re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)).split()
    assert target in targets


# --- ports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--port", "--prefill-port", "--decode-port", "--bootstrap-port"])
def test_up_names_a_taken_port_with_its_setting(
    flag: str, taken: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = said(capsys, "up", "--model", str(model), flag, taken)
    assert taken in error
    assert flag in error


@pytest.mark.parametrize("flag", ["--port", "--bootstrap-port", "--control-port"])
def test_a_prefill_names_a_taken_port_with_its_setting(
    flag: str, taken: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = {"--port": "0", "--bootstrap-port": "0"}
    argv = [part for pair in ({**free, flag: taken}).items() for part in pair]
    error = said(capsys, "worker", "--role", "prefill", "--model", str(model), "--pool-mb", "4", *argv)
    assert taken in error
    assert flag in error


def test_a_decode_names_a_taken_data_port(taken: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--role", "decode", "--model", str(model), "--pool-mb", "4", "--port", "0", "--data-port", taken]
    error = said(capsys, "worker", *argv)
    assert taken in error
    assert "--data-port" in error


def test_a_router_and_a_registry_name_a_taken_port(taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
    for argv in (["router", *pair, "--port", taken], ["registry", "--port", taken]):
        error = said(capsys, *argv)
        assert taken in error
        assert "--port" in error


# --- settings -----------------------------------------------------------------------------------------------------

BAD: list[tuple[list[str], list[str]]] = [
    (["up", "--port", "eight"], ["--port", "'eight'"]),
    (["up", "--prefill", "0"], ["--prefill 0", "--decode 1"]),
    (["up", "--decode", "-1"], ["negative"]),
    (["worker", "--port", "70000"], ["70000", "--port"]),
    (["worker", "--port", "-1"], ["--port", "-1"]),
    (["worker", "--pool-mb", "0"], ["--pool-mb", "0"]),
    (["worker", "--page-size", "0"], ["--page-size", "0"]),
    (["worker", "--max-running", "0"], ["--max-running", "0"]),
    (["worker", "--request-timeout-s", "nan"], ["--request-timeout-s", "nan"]),
    (["worker", "--dp", "0"], ["--dp", "0"]),
    (["worker", "--dp", "9"], ["--dp 9", "1 to 8"]),
    (["worker", "--tp", "3"], ["--tp 3", "1, 2 or 4"]),
    (["worker", "--cp", "2"], ["--cp 2", "context parallel"]),
    (["worker", "--pp", "2"], ["--pp 2", "pipeline parallel"]),
    (["worker", "--transport", "carrier,tcp"], ["carrier", "shm_push"]),
    (["worker", "--transport", ","], ["--transport", "none"]),
    (["worker", "--role", "prefill", "--control-port", "65535", "--tp", "4", "--dp", "2"], ["65535", "65528 or less"]),
    (["worker", "--role", "decode", "--data-port", "65535", "--tp", "2"], ["--data-port 65535", "65534 or less"]),
    (["worker", "--registry", "nonsense"], ["--registry nonsense", "http://"]),
    (["worker", "--registry", "http://[::1"], ["--registry http://[::1"]),
    (["worker", "--registry", "http://10.0.0.1:99999"], ["--registry http://10.0.0.1:99999"]),
    (["worker", "--secret", "ä☃"], ["--secret", "ASCII"]),
    (["worker", "--registry-token", "two\nlines"], ["--registry-token", "ASCII"]),
    (["worker", "--admin-key", "schlüssel"], ["--admin-key", "ASCII"]),
    (["worker", "--hold-term-s", "0"], ["--hold-term-s 0"]),
    (["worker", "--role", "decode", "--host", "10.0.0.1"], ["10.0.0.1", "--secret", "--allow-insecure"]),
    (["worker", "--role", "prefill", "--advertise-host", "node-7"], ["node-7", "--secret", "--allow-insecure"]),
    (["worker", "--role", "prefill", "--host", "0.0.0.0"], ["0.0.0.0", "--advertise-host"]),
    (["up", "--tp", "3"], ["--tp 3"]),
    (["up", "--decode-dp", "99"], ["--dp 99"]),
    (["up", "--transport", "pigeon"], ["pigeon"]),
    (["worker", "--beat-s", "9"], ["--silent-s 5", "--beat-s 9"]),
    (["router"], ["--prefill", "--decode"]),
    (
        ["router", "--prefill", "http://127.0.0.1:x", "--decode", "http://127.0.0.1:1"],
        ["127.0.0.1:x"],
    ),
    (["router", "--worker", "http://127.0.0.1:1", "--retries", "-1"], ["retries", "-1"]),
    (["registry", "--port", "70000"], ["70000"]),
    (["registry", "--host", "10.0.0.1"], ["10.0.0.1", "--write-token", "--allow-insecure"]),
    (["registry", "--write-token", "schlüssel"], ["--write-token", "ASCII"]),
    (["registry", "--room-ttl-s", "nan"], ["--room-ttl-s", "nan"]),
    (["router", "--worker", "http://127.0.0.1:1", "--request-timeout-s", "inf"], ["--request-timeout-s", "inf"]),
    (["up", "--request-timeout-s", "nan"], ["--request-timeout-s", "nan"]),
]


@pytest.mark.parametrize(("argv", "words"), BAD, ids=lambda value: " ".join(value))
def test_a_bad_setting_is_named_with_its_value(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = said(capsys, *argv)
    assert all(word in error for word in words), error


def test_a_bad_setting_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDPLANE_WORKER_POOL_MB", "lots")
    assert "PDPLANE_WORKER_POOL_MB: 'lots'" in said(capsys, "worker")


def test_a_choice_that_is_none_ends_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["worker", "--role", "chef"])
    assert ended.value.code == 2
    assert "aggregated" in capsys.readouterr().err


# --- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["up"], ["worker", "--port", "0"]], ids=lambda argv: argv[0])
def test_without_a_model_the_remedy_is_said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "pdplane model install" in said(capsys, *argv)


def test_model_path_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "pdplane model install" in said(capsys, "model", "path", code=1)


@pytest.mark.parametrize("argv", [["up"], ["worker", "--port", "0"]], ids=lambda argv: argv[0])
def test_a_model_folder_that_is_missing_is_named(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = said(capsys, *argv, "--model", str(tmp_path / "nowhere"))
    assert "nowhere" in error
    assert "Hugging Face" in error


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def rename(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))


DAMAGE = {
    "truncated": (truncate, ["model.safetensors", "truncated", "download the model again"]),
    "of another architecture": (rename, ["config.json", "MambaForCausalLM", "LlamaForCausalLM"]),
    "without weights": (lambda folder: (folder / "model.safetensors").unlink(), ["*.safetensors"]),
    "without a config": (lambda folder: (folder / "config.json").unlink(), ["config.json", "missing"]),
    "without a tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer.json"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_named_with_file_and_remedy(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, words = DAMAGE[damage]
    folder = write_checkpoint(tmp_path / "model")
    harm(folder)
    error = said(capsys, "worker", "--port", "0", "--model", str(folder))
    assert all(word in error for word in words), error


def test_a_pool_that_holds_no_page_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["worker", "--port", "0", "--model", str(model), "--pool-mb", "1", "--page-size", "4096"]
    error = said(capsys, *argv)
    assert "--pool-mb 1 holds no page of" in error
    assert "or more" in error


@pytest.mark.parametrize("argv", [["--seeds", "0"], ["--seeds", "-1"], ["--jobs", "0"]], ids=" ".join)
def test_a_simulation_of_nothing_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *argv])
    assert ended.value.code == 2
    assert f"{argv[1]} is too little" in capsys.readouterr().err
