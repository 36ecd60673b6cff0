"""A local Hugging Face folder of a Llama-family model: which shard holds which tensor, and what the weights are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec

from .config import LlamaConfig, read_config, read_json
from .errors import ModelError
from .safetensors_file import Array, SafetensorsFile, Shape

_INDEX = "model.safetensors.index.json"
_SAMPLE_BYTES = 256


class Checkpoint:
    """The folder's config and tensors. Raises ModelError, which names file and remedy, where it cannot be served."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ModelError(
                f"model folder {folder} does not exist; give a local Hugging Face folder, or run "
                "'pdplane model install' for the embedded model"
            )
        self.folder = folder
        self.config = read_config(folder)
        self._where = {name: file for file in self._shards() for name in file.header}
        self._require(expected_shapes(self.config))

    def _shards(self) -> list[SafetensorsFile]:
        index = self.folder / _INDEX
        if index.exists():
            names = sorted(set(read_json(index).get("weight_map", {}).values()))
        else:
            names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not names:
            raise ModelError(f"{self.folder} holds no *.safetensors file; give a folder with safetensors weights")
        missing = [name for name in names if not (self.folder / name).exists()]
        if missing:
            raise ModelError(f"{self.folder / missing[0]} is missing, {_INDEX} names it; download the model again")
        return [SafetensorsFile(self.folder / name) for name in names]

    def _require(self, shapes: dict[str, Shape]) -> None:
        for name, shape in shapes.items():
            file = self._where.get(name)
            if file is None:
                raise ModelError(f"{self.folder}: tensor {name} is in no safetensors file; download the model again")
            if file.shape(name) != shape:
                raise ModelError(
                    f"{file.path}: tensor {name} has shape {file.shape(name)}, config.json asks for "
                    f"{shape}; the two do not belong together"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str) -> Array:
        return self._where[name].read(name)

    def digest(self) -> str:
        """Hex name of the weights: config, tensor index and samples of every tensor's bytes. Where the files lie and
        how they are split makes no difference."""
        digest = hashlib.blake2b(msgspec.json.encode(self.config), digest_size=16)
        for name in sorted(self._where):
            file = self._where[name]
            entry, raw = file.header[name], file.raw(name)
            digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            for begin in (0, len(raw) // 2, max(0, len(raw) - _SAMPLE_BYTES)):
                digest.update(raw[begin : begin + _SAMPLE_BYTES])
        return digest.hexdigest()


def expected_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """The tensors that must be there (biases may be)."""
    hidden, rows, kv = config.hidden, config.heads * config.head_dim, config.kv_row
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (rows, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, rows),
            prefix + "mlp.gate_proj.weight": (config.ffn, hidden),
            prefix + "mlp.up_proj.weight": (config.ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, config.ffn),
        }
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes
