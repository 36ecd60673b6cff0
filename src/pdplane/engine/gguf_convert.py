"""Turns a Llama GGUF into a Hugging Face folder: float32 safetensors, config, tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from .errors import ModelError
from .safetensors_file import Array, Shape, write_float32

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type


def convert(source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Fills the new folder `folder`. Raises ModelError where `source` is no Llama GGUF with a byte-level BPE."""
    from gguf import GGUFReader  # 130 ms of import that only a conversion needs

    folder.mkdir(parents=True)
    progress(f"reading {source.name}")
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"cannot read {source}: {error}; install the model's package again") from error
    meta = _Metadata(source, reader)
    _write_json(folder / "config.json", _config(meta, {tensor.name for tensor in reader.tensors}))
    _write_json(folder / "generation_config.json", {"eos_token_id": meta["tokenizer.ggml.eos_token_id"]})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(meta))
    _tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write_weights(folder / "model.safetensors", reader, meta, progress)


class _Metadata:
    def __init__(self, source: Path, reader: Any) -> None:
        self._source = source
        self._fields = reader.fields

    def __getitem__(self, name: str) -> Any:
        field = self._fields.get(name)
        if field is None:
            raise ModelError(f"{self._source} has no {name}; it is not the kind of GGUF that can be converted")
        return field.contents()

    def expect(self, name: str, value: str) -> None:
        if self[name] != value:
            raise ModelError(f"{self._source} says {name} = {self[name]!r}; only {value!r} can be converted")


def _config(meta: _Metadata, tensors: set[str]) -> dict[str, object]:
    meta.expect("general.architecture", "llama")
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def _tokenizer_config(meta: _Metadata) -> dict[str, object]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }


def _tokenizer(meta: _Metadata) -> tokenizers.Tokenizer:
    """`smollm` means: single digits first, then the byte-level pattern."""
    meta.expect("tokenizer.ggml.model", "gpt2")
    meta.expect("tokenizer.ggml.pre", "smollm")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _write_weights(path: Path, reader: Any, meta: _Metadata, progress: Callable[[str], None]) -> None:
    from gguf.quants import dequantize

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    sources = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    shapes: dict[str, Shape] = {
        name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in sources.items()
    }
    done = 0

    def produce(name: str) -> Array:
        nonlocal done
        done += 1
        if done % (len(sources) // 5 + 1) == 0:
            progress(f"converting the weights: {100 * done // len(sources)} %")
        tensor = sources[name]
        values: Array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shapes[name])
        kind = tensor.name.split(".")[-2]
        return half_split(values, heads[kind]) if kind in heads else values

    write_float32(path, shapes, produce)


def _hf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, layer, inner = stem.split(".") if stem.count(".") == 2 else ("", "", stem)
    if inner not in _LAYER_NAMES:
        raise ModelError(f"GGUF tensor {name} has no place in a plain Llama model")
    return f"model.layers.{layer}.{_LAYER_NAMES[inner]}.{kind}"


def half_split(weight: Array, heads: int) -> Array:
    """A Llama GGUF orders the rows of Q and K for interleaved rotary pairs (2i, 2i + 1); Hugging Face pairs i with
    i + head_dim / 2."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
