"""When one worker's failures make others preferred, for how long, and what ends it.

Some failures in a row begin a ban. It expires by itself, and then one request at a time tests the worker: an answer
lifts the ban for good, a failure begins one twice as long, up to a limit. Only what was sent after a ban began says
anything of it: the requests that die together with a worker count once, and a long stream that ends well proves
nothing of new ones. A banned worker is never shut out: where nobody else is left, it serves, and that is a test too.
"""

from __future__ import annotations

from typing import Any

from .config import RouterConfig


class Ban:
    """Of one worker. Times are monotonic seconds. `why` "" is no ban; `on_trial`: expired, not lifted yet."""

    __slots__ = ("_times", "failures", "on_trial", "since", "testing", "until", "why")

    def __init__(self) -> None:
        self.lift()

    def lift(self) -> None:
        self.failures = 0  # in a row
        self.why = ""
        self.since = self.until = 0.0
        self.on_trial = self.testing = False
        self._times = 0  # bans without an answer between them

    @property
    def avoid(self) -> str:
        """Why others are preferred now; "" where they are not."""
        return self.why if self.why and (not self.on_trial or self.testing) else ""

    def failed(self, opened: float, why: str, now: float, config: RouterConfig) -> None:
        """A leg that was opened at `opened` failed by this worker's own fault."""
        if opened < self.since:
            return
        self.failures += 1
        if self.failures < config.ban_after:
            return
        length_s = min(config.ban_s * 2 ** min(self._times, 32), max(config.ban_max_s, config.ban_s))
        self._times += 1
        self.since, self.until = now, now + length_s
        self.on_trial = self.testing = False
        self.why = f"{self.failures} failures in a row, the last: {why}"

    def succeeded(self, opened: float) -> None:
        if opened >= self.since:
            self.lift()

    def expire(self, now: float) -> None:
        if self.why and not self.on_trial and self.until <= now:
            self.on_trial = True

    def describe(self, now: float) -> dict[str, Any] | None:
        if not self.why:
            return None
        state = (
            "banned" if not self.on_trial else "one request tests it" if self.testing else "the next request tests it"
        )
        return {
            "why": self.why,
            "state": state,
            "left_s": round(max(self.until - now, 0.0), 3),
            "length_s": round(self.until - self.since, 3),
            "bans_in_a_row": self._times,
        }
