"""One dp group of an aggregated worker: prompt and answer in one process, the yardstick of every hand-off."""

from __future__ import annotations

import msgspec

from pdplane.core.aggregated import AggregatedNode
from pdplane.core.effects import Effect, RunWhole
from pdplane.core.events import Event, JobArrived

from .config import WorkerConfig
from .engine import EngineRequest
from .service import Generation
from .shell import Parts, Shell


class AggregatedShell(Shell[AggregatedNode]):
    role = "aggregated"

    def __init__(self, config: WorkerConfig, parts: Parts) -> None:
        super().__init__(parts)
        self.node = AggregatedNode(config.limits(parts.pages))

    def _arrival(self, generation: Generation, deadline: float) -> Event:
        return JobArrived(
            rid=generation.rid,
            prompt_tokens=len(generation.prompt),
            max_new=generation.sampling.max_tokens,
            deadline=deadline,
            priority=generation.priority,
        )

    def _do_role(self, effect: Effect) -> None:
        assert isinstance(effect, RunWhole), effect
        job = self.jobs.get(effect.rid)
        if job is None:
            self.never_ran(effect.rid)
            return
        sampling = msgspec.structs.replace(job.generation.sampling, max_tokens=effect.max_new)
        self.run(
            EngineRequest(rid=effect.rid, prompt=job.generation.prompt, sampling=sampling, pages=list(effect.pages)),
            job,
        )

    def role_figures(self) -> dict[str, int]:
        return {"waiting": self.node.waiting, "running": len(self.node.batch), "claims": len(self.node.reserve)}
