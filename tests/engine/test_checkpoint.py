"""A model folder is read whole, or refused with the file's name and a remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdplane.engine import ModelError, load
from pdplane.engine.checkpoint import Checkpoint
from pdplane.engine.safetensors_file import SafetensorsFile, write_float32
from pdplane.engine.weights import open_weights, packed_path

from .tiny import write_checkpoint

GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def rewrite(folder: Path, dtype: str, convert: Callable[[np.ndarray], np.ndarray]) -> None:
    """The same weights in another type, as one file."""
    file = SafetensorsFile(folder / "model.safetensors")
    header: dict[str, Any] = {}
    body = b""
    for name in file.header:
        raw = convert(file.read(name)).tobytes()
        header[name] = {"dtype": dtype, "shape": list(file.shape(name)), "data_offsets": [len(body), len(body + raw)]}
        body += raw
    text = json.dumps(header).encode()
    (folder / "new").write_bytes(len(text).to_bytes(8, "little") + text + body)
    (folder / "new").replace(folder / "model.safetensors")


def split(folder: Path) -> None:
    """The same weights in two shards with an index."""
    file = SafetensorsFile(folder / "model.safetensors")
    names = list(file.header)
    where: dict[str, str] = {}
    for number, part in enumerate((names[:7], names[7:])):
        shard = f"model-0000{number + 1}-of-00002.safetensors"
        write_float32(folder / shard, {name: file.shape(name) for name in part}, file.read)
        where |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_a_complete_folder_loads(tiny: Path) -> None:
    engine, tokenizer = load(str(tiny))
    spec = engine.model
    assert (spec.name, spec.architecture, spec.vocab_size) == (tiny.name, "LlamaForCausalLM", 259)
    assert (spec.page_bytes, spec.groups[0].row_bytes, spec.groups[0].layers) == (2 * 16 * 256, 256, (0, 1))
    assert spec.eos_ids == (257,)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_shards_are_the_same_model_as_one_file(tiny: Path, folder: Path) -> None:
    split(folder)
    assert Checkpoint(folder).digest() == Checkpoint(tiny).digest()
    assert np.array_equal(Checkpoint(folder).read(GATE), Checkpoint(tiny).read(GATE))


def test_half_precision_is_widened(tiny: Path, folder: Path) -> None:
    rewrite(folder, "F16", lambda array: array.astype(np.float16))
    np.testing.assert_allclose(Checkpoint(folder).read(GATE), Checkpoint(tiny).read(GATE), rtol=1e-3, atol=1e-6)


def test_bfloat16_is_widened(tiny: Path, folder: Path) -> None:
    rewrite(folder, "BF16", lambda array: (array.view(np.uint32) >> 16).astype(np.uint16))
    np.testing.assert_allclose(Checkpoint(folder).read(GATE), Checkpoint(tiny).read(GATE), rtol=1e-2, atol=1e-6)


def test_other_weights_have_another_digest(tiny: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", seed=99)
    assert Checkpoint(other).digest() != Checkpoint(tiny).digest()


def test_weights_are_packed_once_and_then_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPLANE_HOME", str(folder / "home"))
    lines: list[str] = []
    open_weights(Checkpoint(folder), lines.append)
    assert lines[0] == "packing copy for this machine, once"
    lines.clear()
    weights = open_weights(Checkpoint(folder), lines.append)
    assert lines == []
    assert not weights.layers[0].qkv.panels.flags.writeable


def test_a_packed_file_that_is_cut_short_is_packed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPLANE_HOME", str(folder / "home"))
    checkpoint = Checkpoint(folder)
    whole = open_weights(checkpoint).head.panels.copy()
    packed_path(checkpoint).write_bytes(packed_path(checkpoint).read_bytes()[:-100])
    np.testing.assert_array_equal(open_weights(checkpoint).head.panels, whole)


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as refusal:
        load(str(folder))
    return str(refusal.value)


def test_a_missing_folder_is_named_with_a_remedy(tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere")
    assert "nowhere" in message
    assert "pdplane model install" in message


def test_without_the_embedded_model_load_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDPLANE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="run 'pdplane model install'"):
        load(None)


def test_another_architecture_is_named(folder: Path) -> None:
    edit_config(folder, architectures=["MixtralForCausalLM"])
    assert "config.json says architecture MixtralForCausalLM; the numpy engine serves LlamaForCausalLM" in refused(
        folder
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantised checkpoint"),
        ({"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"hidden_size": "wide"}, "bad value"),
    ],
)
def test_what_the_engine_cannot_do_is_said(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(folder, **changes)
    message = refused(folder)
    assert "config.json" in message
    assert said in message


def test_a_missing_config_value_is_named(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert "config.json lacks 'hidden_size'" in refused(folder)


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_broken_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "config.json" in refused(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    message = refused(folder)
    assert "model.safetensors is truncated" in message
    assert "download the model again" in message


@pytest.mark.parametrize("content", [b"", b"12", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0xx"])
def test_a_file_that_is_no_safetensors_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refused(folder)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no *.safetensors file" in refused(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refused(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    assert "tensor model.layers.2.input_layernorm.weight is in no safetensors file" in refused(folder)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    edit_config(folder, vocab_size=300)
    assert "model.embed_tokens.weight has shape (259, 64), config.json asks for (300, 64)" in refused(folder)


def test_a_quantised_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, "F8_E4M3", lambda array: array.astype(np.uint8))
    assert "has type F8_E4M3" in refused(folder)


def test_a_cache_that_cannot_be_written_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "home").write_text("a file, not a folder")
    monkeypatch.setenv("PDPLANE_HOME", str(folder / "home"))
    assert "set PDPLANE_HOME to a folder that is yours" in refused(folder)
