"""What does the hand-off add to the time to first token? 1P1D beside an aggregated worker, in the same run.

    python benchmarks/handoff.py [--lengths 64,512,2000] [--repeats 15,9,5] [--seed 1] [--stages]

Every prompt is new and goes to both, first one first, then the other. The aggregated worker is asked directly, the
pair through its router. TTFT counts from before the request is sent to the first event with text. The bound: the
median through the pair is at most 15 % + 20 ms over the aggregated one. Exit status 1 where it is not. --stages also
shows where the pair's time goes, from the request records of router and workers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from typing import Any

import httpx
from asking import Answer, ask, client
from fleet import Fleet, fleet
from idle import wait_idle
from prompts import Writer, tokenizer

SHARE, FIXED_S = 0.15, 0.020
WARM_UPS = 2
IDLE_LIMIT_S = 5.0


def main() -> int:
    options = _parser().parse_args()
    if len(options.lengths) != len(options.repeats):
        raise SystemExit(f"{len(options.lengths)} lengths and {len(options.repeats)} repeats; give as many of each")
    with fleet(1, 1, aggregated=1) as made:
        rows = asyncio.run(_measure(made, options))
        _, left = wait_idle(made, IDLE_LIMIT_S)
    late = [row for row in rows if not row]
    print("\n".join(["NOT IDLE:", *left]) if left else "fleet idle afterwards")
    return 1 if late or left else 0


async def _measure(made: Fleet, options: argparse.Namespace) -> list[bool]:
    writer = Writer(tokenizer(), random.Random(options.seed), plain=True)
    async with client(1) as http:
        await _warm_up(http, made, writer, max(options.lengths))
        print(
            f"{'tokens':>7}{'repeats':>9}{'aggregated':>12}{'1P1D':>10}{'added':>10}{'bound':>10}   TTFT, medians, ms"
        )
        verdicts = []
        for length, repeats in zip(options.lengths, options.repeats, strict=True):
            alone, pair = await _alternate(http, made, [writer.text(length) for _ in range(repeats)])
            verdicts.append(_row(length, alone, pair))
            if options.stages:
                _print_stages([await _stages(http, made, answer) for answer in pair])
    return verdicts


async def _warm_up(http: httpx.AsyncClient, made: Fleet, writer: Writer, length: int) -> None:
    """Sessions, connections, buffers; and every page of the pools that the run will use is touched once."""
    print("warming up", file=sys.stderr)
    for tokens in [64] * WARM_UPS + [length]:
        await _alternate(http, made, [writer.text(tokens)])


async def _alternate(http: httpx.AsyncClient, made: Fleet, texts: list[str]) -> tuple[list[Answer], list[Answer]]:
    """(aggregated, pair), in the order of `texts`; who is first changes each time."""
    assert made.router is not None
    urls = (made.aggregated[0].url, made.router.url)
    answers: tuple[list[Answer], list[Answer]] = ([], [])
    for number, text in enumerate(texts):
        for side in (0, 1) if number % 2 else (1, 0):
            answers[side].append(await _first_token(http, urls[side], text))
    return answers


async def _first_token(http: httpx.AsyncClient, url: str, text: str) -> Answer:
    body = {"prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    answer = await ask(http, url, "completions", body)
    if answer.outcome.error or answer.first_content_s is None:
        raise SystemExit(f"no first token from {url}: {answer.outcome}")
    return answer


def _row(length: int, alone: list[Answer], pair: list[Answer]) -> bool:
    base, split = (statistics.median(a.first_content_s or 0.0 for a in answers) for answers in (alone, pair))
    added, bound = split - base, SHARE * base + FIXED_S
    print(
        f"{length:>7}{len(alone):>9}{base * 1e3:>12.1f}{split * 1e3:>10.1f}{added * 1e3:>+10.1f}{bound * 1e3:>10.1f}"
        f"   {'holds' if added <= bound else 'TOO LATE'}",
        flush=True,
    )
    return added <= bound


# --- where the time goes ------------------------------------------------------------------------------------------


async def _stages(http: httpx.AsyncClient, made: Fleet, answer: Answer) -> dict[str, float]:
    """Seconds of each stage of one request, by the wall clocks of the three processes (one machine: one clock)."""
    assert made.router is not None
    router = await _record(http, made.router.url, answer)
    [prefill] = (await _record(http, made.prefills[0].url, answer))["legs"]
    [decode] = (await _record(http, made.decodes[0].url, answer))["legs"]
    began = router["received_unix_s"]
    first_byte = router["attempts"][0]["first_byte_s"]
    marks = {
        "router to prefill": prefill["started_unix_s"] - began,
        "grant": _at(prefill, "Armed", began),
        "prefill starts": _at(prefill, "Streaming", began),
        "prompt computed": _at(prefill, "Flushing", began),
        "last page there": _at(prefill, "Sent", began),
        "SUCCESS at decode": _at(decode, "Success", began),
        "first token at decode": decode["started_unix_s"] + decode["first_token_s"] - began,
        "first byte at router": first_byte,
        "first text at client": answer.first_content_s or 0.0,
    }
    times = list(marks.values())
    return {name: time - before for name, time, before in zip(marks, times, [0.0, *times], strict=False)}


async def _record(http: httpx.AsyncClient, url: str, answer: Answer) -> dict[str, Any]:
    told: dict[str, Any] = (await http.get(f"{url}/requests/{answer.request_id}")).raise_for_status().json()
    return told


def _at(leg: dict[str, Any], state: str, began: float) -> float:
    at = next(entry["at_s"] for entry in leg["entries"] if entry["state"] == state)
    time: float = leg["started_unix_s"] + at - began
    return time


def _print_stages(requests: list[dict[str, float]]) -> None:
    for name in requests[0]:
        print(f"          {name:<24}{statistics.median(request[name] for request in requests) * 1e3:>+9.1f} ms")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=_numbers, default="64,512,2000", help="prompt tokens [64,512,2000]")
    parser.add_argument("--repeats", type=_numbers, default="15,9,5", help="of each length [15,9,5]")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts [1]")
    parser.add_argument("--stages", action="store_true", help="show where the pair's time goes")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
