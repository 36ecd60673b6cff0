"""The cache folder, and how files get into it whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from .errors import ModelError

try:
    import fcntl
except ImportError:  # not on POSIX: two first starts at once may then both convert, and the last rename wins
    fcntl = None  # type: ignore[assignment]


def cache_home(env: Mapping[str, str] = os.environ) -> Path:
    """PDPLANE_HOME, else pdplane's folder in the XDG cache."""
    if env.get("PDPLANE_HOME"):
        return Path(env["PDPLANE_HOME"]).expanduser()
    xdg = env.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "pdplane"


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """One process at a time produces `path`: a lock file beside it. Waits for the other one."""
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = lock.open("w")
    except OSError as error:
        raise ModelError(
            f"cannot write to {path.parent}: {error.strerror}; set PDPLANE_HOME to a folder that is yours"
        ) from error
    with handle:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` by rename when the block ends well, and is removed otherwise.

    Inside `exclusive(path)`: what a killed process left behind is then nobody's, and goes first.
    """
    for leftover in path.parent.glob(f".{path.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    inner = scratch / path.name
    try:
        yield inner
        os.replace(inner, path)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}; free some space or set PDPLANE_HOME") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
