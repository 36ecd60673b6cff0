"""The pages that follow from the code are what the code says, and the commands that they name exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from pdplane.cli.main import parser

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(generate: ModuleType) -> None:
    assert generate.stale() == [], "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))
    known = {name for line in re.findall(r"^([a-z -]+):", makefile, re.MULTILINE) for name in line.split()}
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"pdplane ([a-z]+)\b(?! \()", " ".join(re.findall(r"`([^`]*)`", page.read_text()))))
    actions = parser()._subparsers._group_actions[0]  # type: ignore[union-attr]
    assert named <= set(actions.choices)  # type: ignore[arg-type]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_every_test_that_the_guarantees_rest_on_exists() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::(\w+)`", (ROOT / "docs" / "guarantees.md").read_text())
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in _text(ROOT / "tests" / file)]
    assert len(named) > 30
    assert not missing


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
