"""What a worker's role and dialect want of a request beside its prompt and its sampling: which leg of which pair it is.

Which of these a worker has is chosen once, by `legs_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdplane.core.errors import Refused, bad_request
from pdplane.core.layout import PARAMS
from pdplane.wire.body import invalid
from pdplane.wire.legs import LegFields
from pdplane.wire.params import check_asked_to_hold, read_hand_off, reused_tokens

from ..service import Generation, Service
from .pairing import Named, Side, name_samples
from .ranks import Ranks, check_policy, named_ranks

CHAT = "chat"
GENERATE = "generate"


class Legs(Protocol):
    def prompt(self, endpoint: str, fields: LegFields) -> list[int] | None:
        """The prompt's token ids where the router has them already. Raises Refused (400), as the others do."""
        ...

    def name(self, fields: LegFields, count: int, label: str | None) -> Named:
        """The names of `count` samples."""
        ...

    def bind(self, endpoint: str, fields: LegFields, generations: Sequence[Generation], *, stream: bool) -> None:
        """Writes into the samples with whom they pair."""
        ...


def legs_of(service: Service) -> Legs:
    if service.role == "aggregated":
        return Whole()
    if service.dialect != PARAMS:
        return RoomLegs(service)
    return HeldLegs() if service.role == "prefill" else ReadLegs()


class Whole:
    """No pair: what a router writes for one is not looked at."""

    role = "aggregated"

    def prompt(self, endpoint: str, fields: LegFields) -> list[int] | None:
        return None

    def name(self, fields: LegFields, count: int, label: str | None) -> Named:
        return name_samples(fields, count, label, Side(self.role, None))

    def bind(self, endpoint: str, fields: LegFields, generations: Sequence[Generation], *, stream: bool) -> None:
        _pin(generations, named_ranks(fields, self.role))


class RoomLegs:
    """The rooms dialect: both legs carry a room, and decode's the address of prefill's registry."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def prompt(self, endpoint: str, fields: LegFields) -> list[int] | None:
        return None

    def name(self, fields: LegFields, count: int, label: str | None) -> Named:
        side = Side(self._service.role, self._service.default_bootstrap_port, by_room=True)
        return name_samples(fields, count, label, side)

    def bind(self, endpoint: str, fields: LegFields, generations: Sequence[Generation], *, stream: bool) -> None:
        _pin(generations, named_ranks(fields, self._service.role))
        check_policy(fields.decode_allocation_policy, self._service.policy)


class _OneSample(Whole):
    """The params dialect: a leg is one sample's, because one hold has one reader."""

    def prompt(self, endpoint: str, fields: LegFields) -> list[int] | None:
        return reused_tokens(fields.kv_transfer_params) if endpoint == CHAT else None

    def bind(self, endpoint: str, fields: LegFields, generations: Sequence[Generation], *, stream: bool) -> None:
        if endpoint == GENERATE:
            text = f"/generate is of the rooms dialect, and this {self.role} worker speaks params"
            text = f"{text}; use /v1/completions or /v1/chat/completions"
            raise Refused(bad_request(text, code="wrong_dialect", side=self.role))
        super().bind(endpoint, fields, generations, stream=stream)

    def _one(self, generations: Sequence[Generation]) -> Generation:
        if len(generations) == 1:
            return generations[0]
        text = (
            f"{len(generations)} samples in one leg: a hand-off by kv_transfer_params has one reader; send a pair of "
            "legs for each sample (prompts x n), as a router does"
        )
        raise invalid(text, "n", code="one_sample_per_leg")


class HeldLegs(_OneSample):
    """Prefill's: the KV is held for whoever presents the answer, which therefore is no stream."""

    role = "prefill"

    def bind(self, endpoint: str, fields: LegFields, generations: Sequence[Generation], *, stream: bool) -> None:
        super().bind(endpoint, fields, generations, stream=stream)
        check_asked_to_hold(fields.kv_transfer_params)
        self._one(generations)
        if stream:
            text = "stream must be false at a prefill worker: its answer is one token and kv_transfer_params"
            raise invalid(text, "stream")


class ReadLegs(_OneSample):
    """Decode's: it reads what prefill has answered, and computes the prompt itself where there is no such thing."""

    role = "decode"

    def bind(self, endpoint: str, fields: LegFields, generations: Sequence[Generation], *, stream: bool) -> None:
        super().bind(endpoint, fields, generations, stream=stream)
        hand_off = read_hand_off(fields.kv_transfer_params)
        if hand_off is not None:
            self._one(generations).hand_off = hand_off


def _pin(generations: Sequence[Generation], ranks: Ranks) -> None:
    for generation in generations:
        generation.dp_rank, generation.prefill_dp_rank = ranks
