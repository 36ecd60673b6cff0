"""The shape of a Llama-family model, read from a Hugging Face `config.json`, or the reason why it is not one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Llama3Scaling(msgspec.Struct, frozen=True):
    """Llama 3's stretch of the slow rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context_len: int
    norm_eps: float
    rope_theta: float
    rope_factor: float  # positions are divided by it ("linear" scaling); 1 is off
    llama3: Llama3Scaling | None
    tied: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_row(self) -> int:
        """Floats of one token's K (or V) on one layer."""
        return self.kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or ModelError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; give a complete Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}; download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; download the model again")
    return value


def read_config(folder: Path) -> LlamaConfig:
    """The config of the model in `folder`. Raises ModelError for another architecture or an unknown feature."""
    path = folder / "config.json"
    raw = read_json(path)
    architecture = next(iter(raw.get("architectures") or ["none"]))
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{path} says architecture {architecture}; the numpy engine serves {', '.join(ARCHITECTURES)}")
    _refuse_features(path, raw)
    try:
        return _config(folder, architecture, raw)
    except KeyError as error:
        raise ModelError(f"{path} lacks {error}; download the model again") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path} has a bad value: {error}") from None


def _refuse_features(path: Path, raw: Mapping[str, Any]) -> None:
    act = raw.get("hidden_act", "silu")
    if act != "silu":
        raise ModelError(f"{path} says hidden_act {act!r}; the numpy engine knows silu only")
    if raw.get("use_sliding_window"):
        raise ModelError(f"{path} says use_sliding_window; the numpy engine has full attention only")
    if raw.get("quantization_config"):
        raise ModelError(f"{path} is a quantised checkpoint; give the float32, float16 or bfloat16 one")


def _config(folder: Path, architecture: str, raw: Mapping[str, Any]) -> LlamaConfig:
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    theta, factor, llama3 = _rope(folder / "config.json", raw)
    return LlamaConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden=hidden,
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(raw.get("head_dim") or hidden // heads),
        ffn=int(raw["intermediate_size"]),
        context_len=int(raw.get("max_position_embeddings", 2048)),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_factor=factor,
        llama3=llama3,
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_ids=_eos_ids(folder, raw),
    )


def _rope(path: Path, raw: Mapping[str, Any]) -> tuple[float, float, Llama3Scaling | None]:
    """(theta, linear factor, llama3 scaling). `rope_parameters` is the newer spelling of `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, 1.0, None
    if kind == "linear":
        return theta, float(rope["factor"]), None
    if kind == "llama3":
        scaling = Llama3Scaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
        return theta, 1.0, scaling
    raise ModelError(f"{path} says rope type {kind!r}; the numpy engine knows default, linear and llama3")


def _eos_ids(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json knows best (chat models end turns there), then config.json."""
    generation = folder / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.exists() else None
    value = raw.get("eos_token_id") if value is None else value
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
