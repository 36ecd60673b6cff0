"""Tiny random Llama-family checkpoints, and a plain float64 forward pass to hold the engine against."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pdplane.engine.checkpoint import Checkpoint, expected_shapes
from pdplane.engine.config import LlamaConfig, read_config
from pdplane.engine.model import LlamaModel
from pdplane.engine.numpy_engine import NumpyEngine, attach_pools, spec_of
from pdplane.engine.safetensors_file import write_float32
from pdplane.engine.weights import open_weights
from pdplane.worker.engine import StepOutput

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|pad|>")
EOS = 257
VOCAB = 256 + len(SPECIALS)
TEMPLATE = (
    "{% for m in messages %}\n"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}


def write_checkpoint(folder: Path, *, biases: Sequence[str] = (), seed: int = 0, **config: Any) -> Path:
    """A whole folder: config, random weights, byte tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE | config))
    write_tokenizer(folder)
    shapes = expected_shapes(read_config(folder))
    for name in biases:
        for layer in range(int((BASE | config)["num_hidden_layers"])):
            prefix = f"model.layers.{layer}.{name}"
            shapes[prefix + ".bias"] = shapes[prefix + ".weight"][:1]
    rng = np.random.default_rng(seed)

    def produce(name: str) -> np.ndarray:
        noise = rng.standard_normal(shapes[name], dtype=np.float32)
        return 1.0 + 0.1 * noise if "norm" in name else noise * np.float32(0.15 if "embed" not in name else 0.5)

    write_float32(folder / "model.safetensors", shapes, produce)
    return folder


def byte_pieces() -> list[str]:
    """The 256 characters of byte-level BPE, in byte order, as tokenizers writes them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = {byte: chr(byte) for byte in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    others = iter(char for char in alphabet if char not in plain.values())
    return [plain[byte] if byte in plain else next(others) for byte in range(256)]


def write_tokenizer(folder: Path) -> None:
    vocab = {piece: number for number, piece in enumerate(byte_pieces())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tiny_model(folder: Path, *, fixed: bool = False) -> LlamaModel:
    return LlamaModel(open_weights(Checkpoint(folder)), fixed=fixed)


def tiny_engine(folder: Path, *, fixed: bool = False, page_size: int = 16, pages: int = 32) -> tuple[NumpyEngine, Any]:
    """An engine with a pool attached, and the pool as [pages, page_bytes]."""
    engine = bare_engine(folder, fixed=fixed, page_size=page_size)
    return engine, attach(engine, pages)


def bare_engine(folder: Path, *, fixed: bool = False, page_size: int = 16) -> NumpyEngine:
    """An engine without pools."""
    model = tiny_model(folder, fixed=fixed)
    return NumpyEngine(model, spec_of(model, name="tiny", weights="w", tokenizer="t", page_size=page_size))


def attach(engine: NumpyEngine, pages: int) -> Any:
    (pool,) = attach_pools(engine, pages)
    return pool


def run(engine: NumpyEngine, limit: int = 10_000) -> list[StepOutput]:
    """Steps until idle."""
    outputs: list[StepOutput] = []
    for _ in range(limit):
        if not engine.busy():
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine never became idle")


def tokens_of(outputs: Sequence[StepOutput], rid: str) -> list[int]:
    return [output.token.id for output in outputs if output.rid == rid and output.token is not None]


def reference_logits(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    """Logits [tokens, vocab] in float64, one head and one position at a time, no cache."""
    checkpoint = Checkpoint(folder)
    config = checkpoint.config

    def weight(name: str) -> np.ndarray:
        return checkpoint.read(name).astype(np.float64)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        y = x @ weight(name + ".weight").T
        return y + weight(name + ".bias") if name + ".bias" in checkpoint else y

    x = weight("model.embed_tokens.weight")[list(tokens)]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        x = x + _attention(config, prefix, weight, linear, _norm(x, weight(prefix + "input_layernorm.weight"), config))
        y = _norm(x, weight(prefix + "post_attention_layernorm.weight"), config)
        gate = linear(prefix + "mlp.gate_proj", y)
        x = x + linear(prefix + "mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(prefix + "mlp.up_proj", y))
    head = weight("model.embed_tokens.weight" if config.tied else "lm_head.weight")
    return _norm(x, weight("model.norm.weight"), config) @ head.T


def _attention(config: LlamaConfig, prefix: str, weight: Any, linear: Any, x: np.ndarray) -> np.ndarray:
    count = len(x)
    q, k, v = (linear(f"{prefix}self_attn.{name}_proj", x).reshape(count, -1, config.head_dim) for name in "qkv")
    if config.qk_norm:
        q = _norm(q, weight(prefix + "self_attn.q_norm.weight"), config)
        k = _norm(k, weight(prefix + "self_attn.k_norm.weight"), config)
    q, k = _rotated(config, q), _rotated(config, k)
    out = np.zeros_like(q)
    for head in range(config.heads):
        shared = head // config.group
        for at in range(count):
            scores = k[: at + 1, shared] @ q[at, head] / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            out[at, head] = (weights / weights.sum()) @ v[: at + 1, shared]
    return linear(prefix + "self_attn.o_proj", out.reshape(count, -1))


def _rotated(config: LlamaConfig, heads: np.ndarray) -> np.ndarray:
    half = config.head_dim // 2
    out = np.empty_like(heads)
    for at in range(len(heads)):
        for i in range(half):
            angle = at / config.rope_factor * frequency(config, i)
            first, second = heads[at, :, i], heads[at, :, half + i]
            out[at, :, i] = first * np.cos(angle) - second * np.sin(angle)
            out[at, :, half + i] = second * np.cos(angle) + first * np.sin(angle)
    return out


def frequency(config: LlamaConfig, i: int) -> float:
    """Of the i-th pair. Llama 3's stretch divides slow ones by the factor, keeps fast ones and blends between."""
    plain = config.rope_theta ** (-2 * i / config.head_dim)
    if config.llama3 is None:
        return float(plain)
    scaling = config.llama3
    wavelength = 2 * np.pi / plain
    if wavelength < scaling.original_context / scaling.high_freq_factor:
        return float(plain)
    if wavelength > scaling.original_context / scaling.low_freq_factor:
        return float(plain / scaling.factor)
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return float((1 - smooth) * plain / scaling.factor + smooth * plain)


def _norm(x: np.ndarray, weight: np.ndarray, config: LlamaConfig) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight
