"""The peer of benchmarks/engine.py: transformers on torch, float32, one thread. Runs in its own environment.

`engine_peer.py MODEL_FOLDER JOB` with the job as JSON {"prefill": [lengths], "decode": [batch sizes], "context": n,
"steps": n, "repeats": n}; prints one JSON line {"prefill": {length: tok/s}, "decode": {batch: tok/s}, "text": ...}.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


def main() -> None:
    folder, job = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        result = {
            "prefill": {length: prefill(model, length, job["repeats"]) for length in job["prefill"]},
            "decode": {batch: decode(model, batch, job["context"], job["steps"]) for batch in job["decode"]},
            "text": answer(model, AutoTokenizer.from_pretrained(folder), job["question"]),
        }
    print(json.dumps(result))


def prompt(batch: int, length: int) -> torch.Tensor:
    return torch.randint(10, 40_000, (batch, length), generator=torch.Generator().manual_seed(length))


def prefill(model: torch.nn.Module, length: int, repeats: int) -> float:
    ids = prompt(1, length)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        model(ids, past_key_values=DynamicCache(), logits_to_keep=1)
        times.append(time.perf_counter() - begin)
    return length / min(times[1:])


def decode(model: torch.nn.Module, batch: int, context: int, steps: int) -> float:
    cache = DynamicCache()
    for row in range(0, context, 128):
        model(prompt(batch, 128)[:, : context - row], past_key_values=cache, logits_to_keep=1)
    token = prompt(batch, 1)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        times.append(time.perf_counter() - begin)
    return batch / statistics.median(times)


def answer(model: torch.nn.Module, tokenizer: object, question: str) -> str:
    ids = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=24, do_sample=False)  # type: ignore[operator]
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
