"""One line per claim of a trial, and the exit code in the end."""

from __future__ import annotations

import time


class Verdicts:
    def __init__(self) -> None:
        self._failed: list[str] = []
        self._count = 0
        self._started = time.monotonic()

    def say(self, claim: str, good: bool, detail: object = "") -> bool:
        """Prints the verdict at once; `detail` is what was seen."""
        self._count += 1
        if not good:
            self._failed.append(claim)
        seen = f": {detail}" if str(detail) else ""
        print(f"{'ok  ' if good else 'FAIL'} {claim}{seen}", flush=True)
        return good

    def none(self, claim: str, faults: list[str]) -> bool:
        """Good where there is no fault; else each of them is told."""
        return self.say(claim, not faults, "".join(f"\n       {fault}" for fault in faults))

    def end(self) -> int:
        """The exit code."""
        took = time.monotonic() - self._started
        print(f"\n{self._count - len(self._failed)} of {self._count} claims hold; {took:.0f} s")
        for claim in self._failed:
            print(f"FAULT: {claim}")
        return 1 if self._failed else 0
