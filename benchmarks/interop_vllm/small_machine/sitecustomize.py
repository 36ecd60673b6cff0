"""vLLM and NIXL on a machine of few cores, with this folder on PYTHONPATH.

vLLM pins the thread that computes and moves KV to the machine's last core. A prefill that waits for its blocks to be
fetched steps about a thousand times a second; on one core with decode it keeps decode from fetching them, now and then
until its lease ends. Here nobody is pinned. And NIXL's progress thread, of which the Python API says that it must poll
without a pause, which is a core for each idle server, sleeps NIXL_PTHR_DELAY_US microseconds in between.
"""

import contextlib
import importlib
import os
import sys

DELAY_US = int(os.environ.get("NIXL_PTHR_DELAY_US", "0"))


def _with_a_pause(config: type) -> type:
    class WithAPause(config):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, DELAY_US if name == "pthrDelay" else value)

    return WithAPause


def _stay(pid: int, cores: object) -> None:
    """For os.sched_setaffinity."""


if DELAY_US:
    os.sched_setaffinity = _stay
    with contextlib.suppress(ImportError):
        importlib.import_module("nixl._api")
        module_names = [name for name in sys.modules if name.split(".")[0].startswith("nixl")]
        for holder in [sys.modules[name] for name in module_names]:
            for place in (holder, getattr(holder, "nixlBind", None)):
                if isinstance(getattr(place, "nixlAgentConfig", None), type):
                    place.nixlAgentConfig = _with_a_pause(place.nixlAgentConfig)
