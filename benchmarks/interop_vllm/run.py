"""`make interop-vllm`: real vLLM behind our router, our workers behind vLLM's, and what each hand-off adds.

    PYTHONPATH=benchmarks python benchmarks/interop_vllm/run.py [--parts vllm ours] [--seed 1] [--repeats 12]

vllm: a prefill and a decode server of vLLM with NixlConnector and a single one without, on a CPU, on the embedded
model; our router before the pair. The same text as the single server's in every way to ask; clients that leave in each
phase; lies and deaths; what the hand-off adds. ours: the same with our workers of the params dialect, and the same
texts through vllm-router before them. Exit 1 where a row is not right. NIXL's stalls on a CPU are counted and shown;
they are no failures.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
import traceback
from contextlib import AsyncExitStack
from pathlib import Path

import routers
from added_time import added_time
from deaths import Deaths, Promises, Server
from fleet import Fleet, Process, fleet
from gated import by_ours, by_theirs
from idle import errors_logged, wait_idle
from leaving import Pair, leave_in_each
from our_servers import OurServer
from prompts import Writer, tokenizer
from rows import Rows
from sides import OurSide, VllmSide
from summary import Measured, load
from texts import ALONE_TOKENS, Sources, cases, same_texts
from vllm_servers import BLOCK, HOW, LEASE_S, trio

from pdplane.engine.install import default_model_path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("vllm", "ours")
LENGTHS = (64, 512)
OUR_PAGE = 16  # tokens
OUR_LIMIT_S = 2.0
"""From a client's leaving to every page of our workers being free."""

WORKER_ARGS = ("--dialect", "params", "--pool-mb", "384", "--lease-s", f"{LEASE_S:g}")
QUIETLY = ("--log-level", "warning")
BEFORE_VLLM = ("--backend", "vllm", "--vllm-lease-s", f"{LEASE_S:g}", *QUIETLY)
OF_VLLM = Promises(typed=False, releases=False, free_within_s=4 * LEASE_S)
OF_OURS = Promises(typed=True, releases=True, free_within_s=10.0)


class Run:
    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        self._options, self._model = options, model
        self.measured = Measured()

    def _rows(self, title: str) -> Rows:
        self.measured.parts.append(Rows(title))
        return self.measured.parts[-1]

    def to_its_end(self, part: str) -> None:
        """A part that breaks off is a row that is not right; what was measured before is shown all the same."""
        try:
            asyncio.run(self.vllm() if part == "vllm" else self.ours())
        except Exception as error:
            traceback.print_exc()
            got = f"broke off: {type(error).__name__}: {error}"
            self._rows(f"the part {part}").add("its run", "to its end", got, False)

    # --- vLLM's engines -------------------------------------------------------------------------------------------

    async def vllm(self) -> None:
        async with AsyncExitStack() as stack:
            servers = stack.enter_context(trio(self._options.python, self._model, pinned=self._options.pinned))
            print("vLLM: a prefill, a decode and a single server start", file=sys.stderr, flush=True)
            await asyncio.gather(*(server.ready() for server in servers.all))
            prefill, decode, single = (server.url for server in servers.all)
            router = await stack.enter_async_context(routers.ours(servers.folder, prefill, decode, BEFORE_VLLM))
            sides = VllmSide("prefill", prefill), VllmSide("decode", decode)
            await self._vllm_texts(single, router.url, decode)
            await self._time("vLLM", single, router.url)
            gated, gated_router = await by_ours(stack, servers.folder, sides, BEFORE_VLLM)
            await self._leave("vLLM", gated, None)
            pair: dict[str, Server] = {"prefill": servers.prefill, "decode": servers.decode}
            await self._deaths("vLLM", pair, single, gated, OF_VLLM)
            self._nothing_logged("vLLM", [router, gated_router])

    async def _vllm_texts(self, single: str, front: str, decode: str) -> None:
        rows = self._rows("vLLM behind our router: the same text")
        before = await Sources.of(decode)
        asked = cases(BLOCK, self._options.seed)
        prompt_tokens = await same_texts(rows, single, front, asked)
        used = await Sources.of(decode) - before
        got = f"{used.transferred:g} transferred, {used.cached:g} its cache's, {used.computed:g} computed"
        single_tokens = 2 * ALONE_TOKENS  # of the one case of one token, plain and streamed
        wanted = f"of {prompt_tokens} tokens none computed but {single_tokens}, prompts of one"
        right = used.transferred > 0 and used.computed <= single_tokens
        rows.add("where decode had the prompts from", wanted, got, right)

    # --- our engines ----------------------------------------------------------------------------------------------

    async def ours(self) -> None:
        print("our workers of the params dialect start", file=sys.stderr, flush=True)
        with fleet(1, 1, aggregated=1, worker_args=WORKER_ARGS) as made:
            assert made.router is not None
            await self._time("pdplane", made.aggregated[0].url, made.router.url)
        with fleet(1, 1, aggregated=1, worker_args=(*WORKER_ARGS, "--batch-invariant")) as made:
            await self._our_pair(made)

    async def _our_pair(self, made: Fleet) -> None:
        assert made.router is not None
        prefill, decode, single = made.workers
        sides = OurSide("prefill", prefill.url), OurSide("decode", decode.url)
        asked, handed_over = cases(OUR_PAGE, self._options.seed), sides[1].handed_over
        rows = self._rows("our workers behind our router: the same text")
        await same_texts(rows, single.url, made.router.url, asked, handed_over)
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interop-vllm-")))
            theirs = routers.vllms(folder, self._options.vllm_router, prefill.url, decode.url)
            foreign = await stack.enter_async_context(theirs)
            rows = self._rows("our workers behind vllm-router: the same text")
            one_each = [case for case in asked if case.samples == 1]
            await same_texts(rows, single.url, foreign.url, one_each, handed_over)
            gated = await by_theirs(stack, folder, sides, self._options.vllm_router)
            await self._leave("pdplane behind vllm-router", gated, None)
            gated, gated_router = await by_ours(stack, folder, sides, QUIETLY)
            await self._leave("pdplane", gated, OUR_LIMIT_S)
            pair: dict[str, Server] = {"prefill": OurServer(prefill), "decode": OurServer(decode)}
            await self._deaths("pdplane", pair, single.url, gated, OF_OURS)
            self._nothing_logged("pdplane", [*made.all, gated_router])
        _, left = wait_idle(made, OUR_LIMIT_S)
        self._rows("pdplane: afterwards").add("every figure of the fleet", "idle", "; ".join(left) or "idle", not left)

    # --- both -----------------------------------------------------------------------------------------------------

    async def _time(self, who: str, single: str, front: str) -> None:
        rows, options = self._rows(f"{who}: time that the hand-off adds"), self._options
        self.measured.added += await added_time(rows, who, single, front, LENGTHS, options.repeats, options.seed)

    async def _leave(self, who: str, gated: Pair, limit_s: float | None) -> None:
        rows = self._rows(f"{who}: clients leave")
        seed = self._options.seed + len(self.measured.left)  # prompts that no cache knows from the last time
        self.measured.left[who] = await leave_in_each(rows, gated, limit_s, seed)

    async def _deaths(self, who: str, servers: dict[str, Server], single: str, gated: Pair, promises: Promises) -> None:
        writer = Writer(tokenizer(), random.Random(self._options.seed), plain=True)
        deaths = Deaths(self._rows(f"{who}: lies and deaths"), servers, single, gated, promises, writer)
        self.measured.died[who] = deaths.seen
        await deaths.run()

    def _nothing_logged(self, who: str, processes: list[Process]) -> None:
        logged = errors_logged(processes)
        rows = self._rows(f"{who}: what was logged")
        rows.add("errors in the logs of our processes", "none", "; ".join(logged[:3]) or "none", not logged)


def main() -> int:
    options = _parser().parse_args()
    model = default_model_path()
    for needed in (options.python, options.vllm_router):
        if not needed.exists():
            print(f"{needed} is missing. {HOW}", file=sys.stderr)
            return 1
    if model is None:
        print("the embedded model is not installed; run 'pdplane model install'", file=sys.stderr)
        return 1
    started = time.monotonic()
    run = Run(options, model)
    for part in options.parts:
        run.to_its_end(part)
    print(f"\n{run.measured}")
    failed = run.measured.failed
    print(f"{failed or 'no'} rows not right; {time.monotonic() - started:.0f} s; {load()}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="[all]")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts [1]")
    parser.add_argument("--repeats", type=int, default=12, help="prompts of each length that are timed [12]")
    parser.add_argument("--pinned", action="store_true", help="vLLM as it comes, without small_machine/")
    parser.add_argument("--python", type=Path, default=ROOT / ".interop-vllm-venv/bin/python")
    parser.add_argument("--vllm-router", type=Path, default=ROOT / ".interop-vllm-router-venv/bin/vllm-router")
    return parser


if __name__ == "__main__":
    sys.exit(main())
