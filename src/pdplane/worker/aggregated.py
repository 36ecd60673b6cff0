"""The aggregated worker: prompt and answer in one process, the yardstick of every hand-off."""

from __future__ import annotations

import msgspec

from pdplane.core.aggregated import AggregatedNode
from pdplane.core.effects import Effect, RunWhole
from pdplane.core.events import Event, JobArrived
from pdplane.core.frames import PromptId
from pdplane.core.ids import Instance
from pdplane.core.layout import Stamp
from pdplane.core.node import Limits
from pdplane.transport.pool import PagePool

from .engine import EngineRequest, ModelSpec, Tokenizer
from .service import Generation
from .shell import Shell


class AggregatedShell(Shell[AggregatedNode]):
    role = "aggregated"

    def __init__(
        self,
        *,
        instance: Instance,
        model: ModelSpec,
        stamp: Stamp,
        pool: PagePool,
        tokenizer: Tokenizer,
        limits: Limits,
    ) -> None:
        super().__init__(instance=instance, model=model, stamp=stamp, pool=pool, tokenizer=tokenizer)
        self.node = AggregatedNode(limits)

    def _arrival(self, generation: Generation, prompt: PromptId, deadline: float) -> Event:
        return JobArrived(
            rid=generation.rid,
            prompt_tokens=prompt.tokens,
            max_new=generation.sampling.max_tokens,
            deadline=deadline,
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
