"""Does the hand-off change anything? Greedy answers through pairs beside those of one aggregated worker.

    python benchmarks/equality.py [--matrix quick|full|product] [--only WORDS] [--list] [--prompts N] [--seed 1]

All workers run batch-invariant. First one aggregated worker answers everything alone, one request after the other; then
each fleet of the matrix answers the same requests, many at once. Text, finish reason, matched stop, usage and, where
the dialect shows them, token ids must be equal; cached tokens must be what a prefix cache can give, and where the hit
is known, exactly that; and the fleet must be back at its idle figures. `edges` are prompts around page edges with no,
full and partial prefix hits; `tight` are pools so small that requests must be retracted: a fleet that retracted none
has failed. MATRIX=full in the environment is --matrix full, DIALECT=params is --matrix params: fleets in which decode
pulls, with the prefix cache on and off. Exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence

import tight
from asking import Answer, Outcome, client
from cases import Case, finish_bodies, make_cases, mix
from comparing import Request, answers, as_completion, differences, false_hits
from edges import HITS, Edges
from fleet import Fleet, fleet
from idle import errors_logged, wait_idle
from matrix import MATRICES, PARAMS, Cell, Matrix, expected_s

IDLE_LIMIT_S = 5.0
ENOUGH = 16  # requests from which on every dp group must have had one


class Questions:
    """Everything that is asked, and the answers of one aggregated worker."""

    def __init__(self, matrix: Matrix, kinds: Collection[str], seed: int) -> None:
        self.kinds = kinds
        self.asked_as = _as_it_is if matrix.generate else as_completion
        self.cases = make_cases(matrix.prompts, seed, matrix.longest)
        self.edges = Edges(matrix.edges, seed)
        self.edges.waves = {hit: list(map(self.asked_as, wave)) for hit, wave in self.edges.waves.items()}
        self.tight = [self.asked_as(one) for one in tight.make_requests(seed)]
        self.prompts: list[Request] = []
        self.expected: dict[str, list[Outcome]] = {}

    def ask_reference(self) -> None:
        """SystemExit where the aggregated worker fails or is not idle afterwards."""
        with fleet(prefill=0, decode=0, aggregated=1, worker_args=("--batch-invariant",)) as made:
            asyncio.run(self._ask(made.workers[0].url))
            _, left = wait_idle(made, IDLE_LIMIT_S)
        failed = [outcome.error for of in self.expected.values() for outcome in of if outcome.error]
        if failed or left:
            raise SystemExit("the aggregated worker is no reference:\n" + "\n".join(failed + left))

    async def _ask(self, url: str) -> None:
        asked = {"tight": self.tight} if "tight" in self.kinds else {}
        if "edges" in self.kinds:
            asked |= {f"edges, {hit}": wave for hit, wave in self.edges.waves.items() if hit != "full"}
        if "prompts" in self.kinds:
            async with client(1) as http:
                await finish_bodies(self.cases, http, url)
            asked["prompts"] = self.prompts = [self.asked_as(_request(case)) for case in self.cases]
        for name, requests in asked.items():
            got = await answers(requests, url, 1, f"aggregated, {name}")
            self.expected[name] = [answer.outcome for answer in got]
        if "edges" in self.kinds:
            self.expected["edges, full"] = self.expected["edges, no"]  # the same prompts

    def work(self, asks: str) -> tuple[int, int]:
        """(prompt tokens, new tokens); `prompts` as planned, before their ends are known."""
        if asks == "prompts":
            return sum(case.tokens for case in self.cases), 9 * len(self.cases)
        requests = self.tight if asks == "tight" else self.edges.requests
        return sum(one.prompt_tokens for one in requests), sum(one.new_tokens for one in requests)


def _as_it_is(request: Request) -> Request:
    return request


def _request(case: Case) -> Request:
    return Request(name=str(case), endpoint=case.endpoint, body=case.body, prompt_tokens=case.tokens, new_tokens=0)


@dataclasses.dataclass
class Verdict:
    cell: Cell
    equal: int = 0
    of: int = 0
    shown: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    idle_s: float = 0.0
    took_s: float = 0.0


def main() -> int:
    options = _parser().parse_args()
    matrix = MATRICES[options.matrix]
    if options.prompts:
        matrix = dataclasses.replace(matrix, prompts=options.prompts)
    cells = [cell for cell in matrix.cells if all(word in " ".join(str(cell).split()) for word in options.only)]
    if not cells:
        raise SystemExit(f"no cell of {options.matrix} has {options.only} in its name; --list shows them")
    questions = Questions(matrix, {cell.asks for cell in cells}, options.seed)
    _print_plan(questions, cells, options.matrix)
    if options.list:
        return 0
    started = time.monotonic()
    questions.ask_reference()
    if "prompts" in questions.kinds:
        print("\n".join(mix(questions.cases)), flush=True)
    print(f"one aggregated worker has answered everything ({time.monotonic() - started:.0f} s)\n", flush=True)
    verdicts = [_run(cell, questions) for cell in cells]
    _print_table(verdicts)
    good = sum(not verdict.faults for verdict in verdicts)
    print(f"{good} of {len(verdicts)} cells equal and idle; {time.monotonic() - started:.0f} s")
    return 0 if good == len(verdicts) else 1


# --- one cell ---------------------------------------------------------------------------------------------------------


def _run(cell: Cell, questions: Questions) -> Verdict:
    started = time.monotonic()
    verdict = Verdict(cell)
    extra = tight.WORKER_ARGS if cell.asks == "tight" else ()
    try:
        with fleet(
            cell.prefills,
            cell.decodes,
            worker_args=(*cell.worker_args, *extra),
            prefill_args=cell.prefill.flags,
            decode_args=cell.decode.flags,
        ) as made:
            _ASKS[cell.asks](made, questions, verdict)
            _check_idle(made, verdict)
            verdict.faults += errors_logged(made.all)
    except (RuntimeError, OSError) as error:  # a fleet that does not come up, a connection that breaks
        verdict.faults.append(f"{type(error).__name__}: {error}")
    verdict.took_s = time.monotonic() - started
    _print_verdict(verdict)
    return verdict


def _ask_prompts(made: Fleet, questions: Questions, verdict: Verdict) -> None:
    got = _compare(made, verdict, questions.prompts, questions.expected["prompts"])
    _check_links(made, got, verdict)
    _check_groups(made, verdict)


def _ask_edges(made: Fleet, questions: Questions, verdict: Verdict) -> None:
    expected: Counter[str] = Counter()
    for hit in HITS:
        wave, hits = questions.edges.waves[hit], questions.edges.hits[hit]
        hits = hits if verdict.cell.prefix_cache else [0] * len(hits)
        got = _compare(made, verdict, wave, questions.expected[f"edges, {hit}"])
        wrong = [
            f"{request.name}: {answer.cached_tokens} tokens cached, expected {cached}"
            for request, answer, cached in zip(wave, got, hits, strict=True)
            if answer.cached_tokens != cached and not answer.outcome.error
        ]
        verdict.faults += wrong
        verdict.shown.append(f"{len(wave) - len(wrong)} of {len(wave)} {hit} hits")
        if verdict.cell.policy != PARAMS:
            expected += questions.edges.decode_hits[hit] if verdict.cell.prefix_cache else Counter()
            _check_decode_hits(made, expected, verdict)
        _check_idle(made, verdict)  # the next wave meets what this one has left


def _check_decode_hits(made: Fleet, expected: Counter[str], verdict: Verdict) -> None:
    """Decode has shared what it had, and was sent the rest alone: so many requests of each kind, since its start."""
    by_kind = [decode.metric_by("pdplane_decode_prefix_hits_total", "what") for decode in made.decodes]
    got = sum((Counter({kind: int(count) for kind, count in one.items()}) for one in by_kind), Counter[str]())
    verdict.shown.append(f"decode had all pages of {got['full']}, some of {got['partial']}")
    if got != expected:
        verdict.faults.append(f"decode has hit {dict(got)}, expected {dict(expected)}")


def _ask_tight(made: Fleet, questions: Questions, verdict: Verdict) -> None:
    _compare(made, verdict, questions.tight, questions.expected["tight"])
    retracted, restored = (
        sum(decode.metric(f"pdplane_{name}_total") for decode in made.decodes) for name in ("retracted", "restored")
    )
    verdict.shown.append(f"{retracted:.0f} retracted, {restored:.0f} restored")
    if not (retracted and restored):
        verdict.faults.append("no request was retracted and restored: this cell has shown nothing")


_ASKS = {"prompts": _ask_prompts, "edges": _ask_edges, "tight": _ask_tight}


def _compare(made: Fleet, verdict: Verdict, requests: Sequence[Request], expected: Sequence[Outcome]) -> list[Answer]:
    assert made.router is not None
    got = asyncio.run(answers(requests, made.router.url, verdict.cell.concurrency, str(verdict.cell)))
    wrong = differences(requests, expected, got)
    verdict.of += len(requests)
    verdict.equal += len(requests) - len(wrong)
    verdict.faults += [*wrong, *false_hits(requests, got)]
    return got


def _check_links(made: Fleet, got: Sequence[Answer], verdict: Verdict) -> None:
    """Pages went over as many links as the shapes ask for, all of the cell's transport. The last answer that had any is
    looked at: what decode has already, and in params a prompt of one token, needs none."""
    links = next((found for answer in reversed(got) if (found := _links(made, answer))), [])
    kinds = {link["transport"] for link in links}
    verdict.shown.append(f"{len(links)} link{'s' * (len(links) != 1)} by {', '.join(sorted(kinds)) or 'none'}")
    if kinds != {verdict.cell.transport}:
        verdict.faults.append(f"pages went by {sorted(kinds)}, not by {verdict.cell.transport}")
    split = max(verdict.cell.prefill.tp, verdict.cell.decode.tp)
    if (len(links) > 1) != (split > 1):
        verdict.faults.append(f"{len(links)} links between {verdict.cell.prefill} and {verdict.cell.decode}")


def _links(made: Fleet, answer: Answer) -> list[dict[str, str]]:
    """Over which decode was sent the pages of this answer."""
    records = [one for one in (decode.record(answer.request_id) for decode in made.decodes) if one]
    return [link for one in records for leg in one["legs"] for grant in leg["grants"] for link in grant["links"]]


def _check_groups(made: Fleet, verdict: Verdict) -> None:
    """Every dp group has worked."""
    for worker in made.workers:
        steps = worker.metric_by("pdplane_engine_steps_total", "dp")
        if len(steps) > 1:
            verdict.shown.append(f"{worker.name}: steps {'/'.join(f'{count:.0f}' for count in steps.values())}")
            if verdict.of >= ENOUGH and not all(steps.values()):
                verdict.faults.append(f"{worker.name}: a dp group has had nothing to do: {steps}")


def _check_idle(made: Fleet, verdict: Verdict) -> None:
    waited, left = wait_idle(made, IDLE_LIMIT_S)
    verdict.idle_s = max(verdict.idle_s, waited)
    verdict.faults += [f"not idle: {what}" for what in left]


# --- what is printed --------------------------------------------------------------------------------------------------


def _print_plan(questions: Questions, cells: Sequence[Cell], name: str) -> None:
    prompts, new = (sum(numbers) for numbers in zip(*map(questions.work, questions.kinds), strict=True))
    total = reference = expected_s(prompts, new, 1)
    print(f"plan {name}, {len(cells)} cells; seconds expected on two idle cores:")
    print(f"  {'aggregated, everything once, one by one':66}{reference:5.0f}")
    for cell in cells:
        took = expected_s(*questions.work(cell.asks), cell.concurrency)
        total += took
        print(f"  {cell!s:66}{took:5.0f}")
    print(f"  {'':66}{total:5.0f} in all\n", flush=True)


def _print_verdict(verdict: Verdict) -> None:
    shown = "; ".join(verdict.shown)
    print(f"{verdict.cell}: {verdict.equal} of {verdict.of} equal; {shown} ({verdict.took_s:.0f} s)")
    for fault in verdict.faults:
        print(f"    {fault}")
    sys.stdout.flush()


def _print_table(verdicts: Sequence[Verdict]) -> None:
    print(f"\n{'cell':68}{'equal':>9}{'idle, s':>9}{'took, s':>9}   verdict, and what it has shown")
    for verdict in verdicts:
        word = "FAILED" if verdict.faults else "ok"
        print(
            f"{verdict.cell!s:68}{f'{verdict.equal}/{verdict.of}':>9}{verdict.idle_s:9.2f}{verdict.took_s:9.0f}"
            f"   {word}; {'; '.join(verdict.shown)}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = os.environ.get("MATRIX") or ("params" if os.environ.get("DIALECT") == "params" else "quick")
    parser.add_argument("--matrix", choices=sorted(MATRICES), default=chosen, help=f"which fleets [{chosen}]")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORDS", help="cells with all of these in their name")
    parser.add_argument("--list", action="store_true", help="print the plan and end")
    parser.add_argument("--prompts", type=int, default=0, help="how many [16 or 60, the matrix says it]")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and mix [1]")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
