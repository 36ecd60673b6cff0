"""`pdplane worker`: one prefill, decode or aggregated worker."""

from __future__ import annotations

import argparse
import os
import sys

from pdplane import settings
from pdplane.settings import BadSetting
from pdplane.worker.config import EMBEDDED, WorkerConfig
from pdplane.worker.engine import Engine, Tokenizer

from .process import run, set_up_logging, show_config


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "worker",
        help="run one worker",
        description="Run one worker: prefill (with its registry), decode, or aggregated (both in one process).",
        epilog="example: pdplane worker --role prefill --port 8100 --bootstrap-port 8998",
    )
    settings.add_arguments(parser, WorkerConfig)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    config = settings.load(WorkerConfig, vars(args))
    set_up_logging(config.log_level)
    # OpenBLAS reads it when numpy is first imported: threads that spin cost 2 to 5 times on a shared machine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(config.threads))
    from pdplane.worker.server import serve

    show_config(f"{config.role} worker", config)
    run(serve(config, load_engine, lambda text: print(text, flush=True)))
    return 0


def load_engine(config: WorkerConfig) -> tuple[Engine, Tokenizer]:
    """Raises BadSetting where there is no such model, naming the remedy."""
    from pdplane import engine

    try:
        return engine.load(
            None if config.model == EMBEDDED else config.model,
            page_size=config.page_size,
            batch_invariant=config.batch_invariant,
            progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except engine.ModelError as error:
        raise BadSetting(f"--model: {error}") from None
