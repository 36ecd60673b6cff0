"""The weights as the forward pass wants them: float32 panels in one cached file, mapped by every worker.

A checkpoint is packed once, into `packed/<digest>.safetensors` of the cache folder: projections that read the same
input are stacked, everything is cut into panels (panels.py), bf16 and f16 are widened. Later starts only map it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .checkpoint import Checkpoint
from .config import LlamaConfig
from .errors import ModelError
from .home import appearing, cache_home, exclusive
from .panels import WIDTH, Linear, panels_of
from .safetensors_file import Array, SafetensorsFile, Shape, write_float32

_FORMAT = 1
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Layer:
    input_norm: Array
    qkv: Linear
    q_norm: Array | None
    k_norm: Array | None
    o: Linear
    post_norm: Array
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    config: LlamaConfig
    embedding: Array | None  # None: tied, the head's rows
    layers: tuple[Layer, ...]
    norm: Array
    head: Linear


@dataclass(frozen=True)
class _Stack:
    """A packed tensor: `sources` stacked along the output, each with this many outputs."""

    sources: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int

    @property
    def features(self) -> int:
        return sum(self.outputs)


def open_weights(checkpoint: Checkpoint, progress: Progress | None = None) -> Weights:
    """The mapped weights, packed first where this machine has not done it yet."""
    path = packed_path(checkpoint)
    file = _intact(path)
    if file is None:
        with exclusive(path):
            if _intact(path) is None:
                _pack(checkpoint, path, progress or (lambda line: None))
        file = SafetensorsFile(path)
    return _weights(checkpoint.config, file)


def _intact(path: Path) -> SafetensorsFile | None:
    """The packed file, unless it is missing or cut short (by a full disk, say): then it is packed again."""
    try:
        return SafetensorsFile(path) if path.exists() else None
    except ModelError:
        return None


def packed_path(checkpoint: Checkpoint) -> Path:
    return cache_home() / "packed" / f"{checkpoint.digest()}-v{_FORMAT}.safetensors"


def _stacks(config: LlamaConfig) -> dict[str, _Stack]:
    rows, hidden = config.heads * config.head_dim, config.hidden
    head = "model.embed_tokens" if config.tied else "lm_head"
    stacks = {"head": _Stack((head,), (config.vocab_size,), hidden)}
    for layer in range(config.layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        stacks |= {
            f"{layer}.qkv": _Stack(
                (attention + "q_proj", attention + "k_proj", attention + "v_proj"),
                (rows, config.kv_row, config.kv_row),
                hidden,
            ),
            f"{layer}.o": _Stack((attention + "o_proj",), (hidden,), rows),
            f"{layer}.gate_up": _Stack((mlp + "gate_proj", mlp + "up_proj"), (config.ffn, config.ffn), hidden),
            f"{layer}.down": _Stack((mlp + "down_proj",), (hidden,), config.ffn),
        }
    return stacks


def _vectors(config: LlamaConfig) -> dict[str, str]:
    """Packed name -> checkpoint name of what is kept as it is."""
    names = {"norm": "model.norm.weight"}
    if not config.tied:
        names["embedding"] = "model.embed_tokens.weight"
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        names[f"{layer}.input_norm"] = prefix + "input_layernorm.weight"
        names[f"{layer}.post_norm"] = prefix + "post_attention_layernorm.weight"
        if config.qk_norm:
            names[f"{layer}.q_norm"] = prefix + "self_attn.q_norm.weight"
            names[f"{layer}.k_norm"] = prefix + "self_attn.k_norm.weight"
    return names


def _pack(checkpoint: Checkpoint, path: Path, progress: Progress) -> None:
    stacks, vectors = _stacks(checkpoint.config), _vectors(checkpoint.config)
    biased = {name for name, stack in stacks.items() if any(f"{source}.bias" in checkpoint for source in stack.sources)}
    shapes: dict[str, Shape] = {}
    for name, stack in stacks.items():
        shapes[name] = (-(-stack.features // WIDTH), stack.inputs, WIDTH)
        if name in biased:
            shapes[name + ".bias"] = (stack.features,)
    shapes |= {name: checkpoint.read(source).shape for name, source in vectors.items()}
    done = 0

    def produce(name: str) -> Array:
        nonlocal done
        done += 1
        if done % (len(shapes) // 5 + 1) == 0:
            progress(f"packing {checkpoint.folder.name} for this machine: {100 * done // len(shapes)} %")
        if name in vectors:
            return checkpoint.read(vectors[name])
        if name.endswith(".bias"):
            return _bias(checkpoint, stacks[name.removesuffix(".bias")])
        parts = [checkpoint.read(f"{source}.weight") for source in stacks[name].sources]
        return panels_of(np.concatenate(parts) if len(parts) > 1 else parts[0])

    progress(f"packing {checkpoint.folder.name} for this machine, once")
    with appearing(path) as scratch:
        write_float32(scratch, shapes, produce)


def _bias(checkpoint: Checkpoint, stack: _Stack) -> Array:
    parts = [
        checkpoint.read(f"{source}.bias") if f"{source}.bias" in checkpoint else np.zeros(outputs, np.float32)
        for source, outputs in zip(stack.sources, stack.outputs, strict=True)
    ]
    return np.concatenate(parts)


def _weights(config: LlamaConfig, file: SafetensorsFile) -> Weights:
    stacks = _stacks(config)

    def linear(name: str) -> Linear:
        bias = file.read(name + ".bias") if name + ".bias" in file else None
        return Linear(file.read(name), stacks[name].features, bias)

    def layer(number: int) -> Layer:
        return Layer(
            input_norm=file.read(f"{number}.input_norm"),
            qkv=linear(f"{number}.qkv"),
            q_norm=file.read(f"{number}.q_norm") if config.qk_norm else None,
            k_norm=file.read(f"{number}.k_norm") if config.qk_norm else None,
            o=linear(f"{number}.o"),
            post_norm=file.read(f"{number}.post_norm"),
            gate_up=linear(f"{number}.gate_up"),
            down=linear(f"{number}.down"),
        )

    return Weights(
        config=config,
        embedding=None if config.tied else file.read("embedding"),
        layers=tuple(layer(number) for number in range(config.layers)),
        norm=file.read("norm"),
        head=linear("head"),
    )
