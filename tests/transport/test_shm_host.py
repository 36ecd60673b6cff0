"""Which host: equal where pools can be shared, different where anything that this takes differs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdplane.transport import host_identity as module
from pdplane.transport.host_identity import NAMESPACES, host_identity


def test_another_process_of_this_host_says_the_same() -> None:
    program = "from pdplane.transport.host_identity import host_identity; print(host_identity())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == host_identity() != ""


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_another_namespace_is_another_host(monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    here, stat = host_identity(), os.stat

    def elsewhere(path: str) -> os.stat_result:
        return stat(f"/proc/self/ns/{'mnt' if path.endswith(namespace) else path.rsplit('/', 1)[1]}")

    monkeypatch.setattr(os, "stat", elsewhere)
    assert host_identity() not in (here, "")


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(os, "geteuid", lambda: 4711),
        lambda patch: patch.setattr(Path, "read_text", lambda _: "another boot\n"),
    ],
    ids=["uid", "boot"],
)
def test_another_user_or_boot_is_another_host(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    here = host_identity()
    change(monkeypatch)
    assert host_identity() not in (here, "")


def test_without_what_it_takes_a_process_shares_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert host_identity() == ""
    monkeypatch.undo()
    monkeypatch.delattr(module.fcntl, "F_OFD_SETLK")
    assert host_identity() == ""
