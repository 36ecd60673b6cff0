"""Tokens per second of the numpy engine with one thread, beside transformers on torch (float32), same weights.

    python benchmarks/engine.py [--batch-invariant] [--peer-python .bench-venv/bin/python]

Prefill is the best of 5, decode the median of 20 steps. The machine changes, the ratio to the peer less so: the
reference is a row measured earlier for a plain numpy engine and for a torch engine side by side, and the claim is
that our ratio to the peer is within 10 % of theirs.
Exit status 1 where it is not; without a peer environment only our own numbers are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is imported

import numpy as np

from pdplane.core.ids import PageId, Rid
from pdplane.engine import install_model
from pdplane.engine.loading import load_numpy
from pdplane.engine.numpy_engine import NumpyEngine, pool_bytes
from pdplane.worker.engine import EngineRequest, Sampling, Tokenizer

PREFILL, DECODE, CONTEXT, STEPS, REPEATS = (256, 1024), (1, 4, 16), 500, 20, 5
QUESTION = "What is the capital of France?"
PAGES = 700
TOLERANCE = 0.9
REFERENCE = {  # tok/s: (numpy, torch) float32, one thread
    "prefill 256": (454, 420),
    "prefill 1024": (401, 369),
    "decode 1": (43, 26),
    "decode 4": (59, 61),
    "decode 16": (58, 92),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Prefill and decode speed of the numpy engine beside a peer.")
    parser.add_argument("--batch-invariant", action="store_true", help="measure the batch-invariant mode")
    parser.add_argument("--peer-python", default=".bench-venv/bin/python", help="an interpreter with torch and "
                        "transformers [.bench-venv/bin/python]")  # fmt: skip
    options = parser.parse_args()
    folder = install_model(lambda line: print(line, file=sys.stderr))
    ours = measure(options.batch_invariant)
    peer = measure_peer(options.peer_python, folder)
    return report(ours, peer)


def measure(batch_invariant: bool) -> dict[str, float]:
    engine, tokenizer = load_numpy(None, batch_invariant=batch_invariant)
    pool = pool_bytes(engine.model, PAGES)
    pool.fill(0)  # every page touched before the clock runs
    engine.attach([pool.data.cast("B")], PAGES)
    print(f"numpy engine: {answer(engine, tokenizer)!r}")
    speeds = {f"prefill {length}": prefill(engine, length) for length in PREFILL}
    return speeds | {f"decode {batch}": decode(engine, batch) for batch in DECODE}


def measure_peer(python: str, folder: Path) -> dict[str, float]:
    if not Path(python).exists():
        print(f"no peer: {python} does not exist; 'make bench-engine' makes that environment", file=sys.stderr)
        return {}
    job = {"prefill": PREFILL, "decode": DECODE, "context": CONTEXT, "steps": STEPS, "repeats": REPEATS}
    script = Path(__file__).with_name("engine_peer.py")
    command = [python, str(script), str(folder), json.dumps(job | {"question": QUESTION})]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the peer failed:\n{done.stderr[-2000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"transformers: {result['text']!r}")
    return {f"{kind} {size}": speed for kind in ("prefill", "decode") for size, speed in result[kind].items()}


def report(ours: dict[str, float], peer: dict[str, float]) -> int:
    print(f"{'tok/s, 1 thread':<16}{'numpy':>8}{'peer':>8}{'ratio':>8}{'reference ratio':>18}")
    slower = []
    for name, (numpy_row, torch_row) in REFERENCE.items():
        if not peer:
            print(f"{name:<16}{ours[name]:>8.0f}{'-':>8}{'-':>8}{numpy_row / torch_row:>18.2f}")
            continue
        ratio, reference = ours[name] / peer[name], numpy_row / torch_row
        within = ratio >= TOLERANCE * reference
        slower += [] if within else [name]
        verdict = "within 10 %" if within else "SLOWER"
        print(f"{name:<16}{ours[name]:>8.0f}{peer[name]:>8.0f}{ratio:>8.2f}{reference:>18.2f}  {verdict}")
    if slower:
        print(f"slower than the reference ratio by more than 10 %: {', '.join(slower)}")
    return 1 if slower else 0


def prompt(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(10, 40_000, length)]


def scattered(count: int, seed: int) -> list[PageId]:
    return [PageId(int(page)) for page in np.random.default_rng(seed).permutation(PAGES)[:count]]


def answer(engine: NumpyEngine, tokenizer: Tokenizer) -> str:
    ids = tokenizer.chat([{"role": "user", "content": QUESTION}])
    engine.add(EngineRequest(rid=Rid("q"), prompt=ids, sampling=Sampling(max_tokens=24, temperature=0.0),
                             pages=scattered(8, 0)))  # fmt: skip
    tokens: list[int] = []
    while engine.busy():
        tokens += [output.token.id for output in engine.step() if output.token is not None]
    return tokenizer.decode(tokens)


def prefill(engine: NumpyEngine, length: int) -> float:
    times = []
    for repeat in range(REPEATS + 1):
        engine.add(EngineRequest(rid=Rid("p"), prompt=prompt(length, repeat), pages=scattered(length // 16, repeat),
                                 sampling=Sampling(max_tokens=1, temperature=0.0)))  # fmt: skip
        begin = time.perf_counter()
        while engine.busy():
            engine.step()
        times.append(time.perf_counter() - begin)
    return length / min(times[1:])


def decode(engine: NumpyEngine, batch: int) -> float:
    """Rows with a context that needs no computing: its KV is whatever the pages hold."""
    sampling = Sampling(max_tokens=STEPS + 1, temperature=0.0, ignore_eos=True)
    each = -(-(CONTEXT + STEPS + 1) // 16)
    pages = scattered(batch * each, batch)
    for row in range(batch):
        engine.add(EngineRequest(rid=Rid(f"d{row}"), prompt=prompt(CONTEXT, row), computed=CONTEXT, prior=(7,),
                                 sampling=sampling, pages=pages[row * each : (row + 1) * each]))  # fmt: skip
    times = []
    while engine.busy():
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return batch / statistics.median(times)


if __name__ == "__main__":
    raise SystemExit(main())
