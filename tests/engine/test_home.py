from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pdplane.engine.errors import ModelError
from pdplane.engine.home import appearing, cache_home, exclusive


def test_the_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    assert cache_home({"PDPLANE_HOME": str(tmp_path), "XDG_CACHE_HOME": "/x"}) == tmp_path
    assert cache_home({"XDG_CACHE_HOME": "/x"}) == Path("/x/pdplane")
    assert cache_home({}) == Path.home() / ".cache" / "pdplane"


def test_a_path_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with appearing(target) as scratch:
        scratch.mkdir()
        (scratch / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert list(tmp_path.iterdir()) == [target]


def test_a_path_that_fails_to_be_made_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with appearing(tmp_path / "file") as scratch:
            scratch.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / ".file-abc").mkdir()
    (tmp_path / ".file-abc" / "file").write_text("half")
    with appearing(tmp_path / "file") as scratch:
        scratch.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_a_model_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No space left on device; free some space"), appearing(tmp_path / "file"):
        raise OSError(28, "No space left on device")


def test_one_at_a_time_makes_a_path(tmp_path: Path) -> None:
    order: list[str] = []
    started = threading.Event()

    def second() -> None:
        started.set()
        with exclusive(tmp_path / "file"):
            order.append("second")

    other = threading.Thread(target=second)
    with exclusive(tmp_path / "file"):
        other.start()
        started.wait()
        order.append("first")
    other.join()
    assert order == ["first", "second"]
