from __future__ import annotations

from pathlib import Path

import pytest

from .tiny import write_checkpoint


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packed weights of tests stay out of the user's cache; one folder for all tests, so that packs are shared."""
    home = tmp_path_factory.getbasetemp() / "pdplane-home"
    monkeypatch.setenv("PDPLANE_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama of 2 layers."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
