"""Benchmarks are scripts that import each other by name: their folders come last on the path."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "interop_vllm")]
