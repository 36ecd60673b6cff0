"""A worker's dp groups in the params dialect. No room binds a request to a group: it goes to the least loaded one, and
what it is answered, or brings, names the group that holds its KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdplane.core.errors import Cause
from pdplane.core.events import Handle
from pdplane.wire.params import handles_in

from .group import Group, released_unproven
from .params_decode import ParamsDecodeShell
from .params_prefill import ParamsPrefillShell
from .service import Generation


class ParamsPrefillGroup(Group[ParamsPrefillShell]):
    @property
    def holds(self) -> list[dict[str, Any]]:
        return [hold for shell in self.shells for hold in shell.holds]

    def release_holds(self, rids: Sequence[str], cause: Cause) -> tuple[list[str], list[str]]:
        """Nobody will read these: (released, unknown), by exact name. Idempotent."""
        released = [rid for rid in rids if any(shell.release_hold(rid, cause) for shell in self.shells)]
        gone = set(released)
        return released, [rid for rid in rids if rid not in gone]


class ParamsDecodeGroup(Group[ParamsDecodeShell]):
    def named_in(self, body: bytes) -> list[Handle]:
        return handles_in(body)

    def leg_refused(self, leg: Handle, cause: Cause) -> None:
        """Prefill need not hold on: nobody will read, unless somebody here does."""
        if self._reader_of(leg) is None:
            self.shells[0].handle_refused(leg, cause)

    def _dp_of(self, generation: Generation) -> int:
        """Who brings a hold again that is being read goes to its reader, and is refused there."""
        reader = self._reader_of(generation.hand_off.handle) if generation.hand_off else None
        return super()._dp_of(generation) if reader is None else reader

    def _reader_of(self, handle: Handle) -> int | None:
        return next((dp for dp, shell in enumerate(self.shells) if shell.reads(handle)), None)

    def release(self, instance: str, grant: int) -> int:
        return released_unproven(self.shells, instance, grant)


ParamsGroup = ParamsPrefillGroup | ParamsDecodeGroup
