"""`pdplane registry`: a bootstrap registry on its own, for one prefill group."""

from __future__ import annotations

import argparse

from pdplane import settings
from pdplane.registry.server import RegistryConfig, serve

from .process import run, set_up_logging, show_config


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "registry",
        help="run a registry apart from its prefill",
        description="Run the bootstrap registry of one prefill group, whose instances may come and go behind its "
        "address; they find it by --registry. A prefill worker embeds one by default. Beyond loopback it starts with "
        "--write-token, which prefills give as --registry-token, or where --allow-insecure says that none is needed; "
        "looking up is open to whoever reaches it.",
        epilog="example: PDPLANE_REGISTRY_WRITE_TOKEN=... pdplane registry --host 10.0.0.1",
    )
    settings.add_arguments(parser, RegistryConfig)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    config = settings.load(RegistryConfig, vars(args))
    set_up_logging(config.log_level)
    show_config("registry", config)
    run(serve(config))
    return 0
