"""`pdplane router`: the public door before prefill and decode workers."""

from __future__ import annotations

import argparse
import gc

from pdplane import settings
from pdplane.router.config import RouterConfig
from pdplane.settings import BadSetting

from .process import run, set_up_logging, show_config


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "router",
        help="run the router",
        description="Run the router: it pairs a prefill with a decode for every request and streams decode's answer. "
        "Which dialect a worker of ours speaks (rooms or params) it says itself; native ones are named by --backend. "
        "Beyond loopback without --api-key it serves whoever reaches it, says so in a warning, and refuses abort_all "
        "(403), which would end the requests of strangers; an abort by rid stays.",
        epilog="examples: pdplane router --prefill http://10.0.0.1:8100@8998 --decode http://10.0.0.2:8200; "
        "before native engines the same with --backend vllm (prefill and decode each with a KV connector) or sglang",
    )
    settings.add_arguments(parser, RouterConfig)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    config = settings.load(RouterConfig, vars(args))
    if not (config.worker or (config.prefill and config.decode)):
        raise BadSetting("no workers: give at least one --prefill URL and one --decode URL (or --worker URL)")
    set_up_logging(config.log_level)
    show_config("router", config)
    from pdplane.router.server import serve

    gc.freeze()
    try:
        run(serve(config))
    except OSError as error:
        raise BadSetting(f"cannot listen on {config.host}:{config.port}: {error}; choose another --port") from None
    return 0
