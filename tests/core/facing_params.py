"""Two machines of the params dialect facing each other. As in facing.py nothing happens by itself: a test brings the
first leg (`ask`), computes (`computed`, or both: `hold`), brings the second leg (`read`), lands moves (`land_all`),
delivers frames (`pump`) and passes time (`wait`).

Leg `n` is rid "p<n>" at prefill and "d<n>" at decode. Every page of both pools is walked after every event.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdplane.core.connector import KVConnector
from pdplane.core.effects import (
    AbortEngine,
    AnswerFailed,
    AnswerHeld,
    AnswerRow,
    Dial,
    Effect,
    RetractEngine,
    RunPrefill,
    RunWhole,
    Ungate,
)
from pdplane.core.errors import Cause, client_left
from pdplane.core.events import (
    Cancel,
    Computed,
    ControlEndpoint,
    Event,
    GrantQuiet,
    Handle,
    PagesLanded,
    Released,
    RequestArrived,
    Retracted,
    Sampled,
)
from pdplane.core.frames import PromptId
from pdplane.core.ids import HoldNo, Instance, Link, PageId, Rank, Rid, Seat, Shape
from pdplane.core.node import Limits, Node
from pdplane.core.pages import Page
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.core.params.holder import Holder
from pdplane.core.params.prefill import ParamsPrefillNode
from pdplane.core.params.reader import Reader
from pdplane.core.params.scheduled import Scheduled
from pdplane.core.params.table import H, L, RequestStatus

from .facing import PAGE, STAMP, Box, Facing, identity, limits

PARAMS = msgspec.structs.replace(STAMP, dialect="params")
IDLE_KEYS = {"sessions", "owed"}


class WalkedBox(Box):
    """Every page and every cached page is walked after every event."""

    def take(self, event: Event) -> list[Effect]:
        effects = super().take(event)
        assert self.node.audit_all() == []
        return effects


class FacingParams(Facing):
    """One decode (`d`), one prefill (`p`) unless more are added. `d_connector`, `p_connector`: others than ours.
    `recompute`: decode's kv_load_failure_policy."""

    def __init__(
        self,
        *,
        recompute: bool = False,
        d_connector: Callable[[ParamsDecodeNode], KVConnector] | None = None,
        p_connector: Callable[[ParamsPrefillNode], KVConnector] | None = None,
        d_limits: Limits | None = None,
        **more: object,
    ) -> None:
        self._connectors = d_connector, p_connector
        self.handles: dict[int, Handle] = {}
        self.silent: set[ControlEndpoint] = set()  # a dial there is simply out
        self.everybody: list[Box] = []  # the dead among them
        d_limits = msgspec.structs.replace(d_limits or limits(), recompute=recompute)
        super().__init__(stamp=PARAMS, d_limits=d_limits, **more)  # type: ignore[arg-type]

    def add_decode(self, name: str) -> Box:
        node = ParamsDecodeNode(identity(name, self.stamp, self.tp[1]), self.d_limits, self._connectors[0])
        return self._add(node)

    def add_prefill(self, name: str, stamp: object = None) -> Box:
        me = identity(name, self.stamp, self.tp[0])
        box = self._add(ParamsPrefillNode(me, self.p_limits, self._connectors[1]))
        for rank in me.ranks:
            self.listeners[self.port(rank.tp)] = box, rank
        return box

    def _add(self, node: Node) -> Box:
        self.boxes.append(WalkedBox(node, self))
        self.everybody.append(self.boxes[-1])
        return self.boxes[-1]

    def carry_out(self, box: Box, effect: Effect) -> None:
        if not (isinstance(effect, Dial) and effect.endpoint in self.silent):
            super().carry_out(box, effect)

    @staticmethod
    def port(tp: int = 0, host: str = "p") -> ControlEndpoint:
        return ControlEndpoint(host, 1 + tp)

    # --- leg 1 ------------------------------------------------------------------------------------------------------

    def ask(self, number: int, tokens: int = 40, name: bytes = b"prompt", **more: object) -> Rid:
        """Leg 1 is at prefill; its prompt is computed as soon as pages are there."""
        self.p.take(request(f"p{number}", tokens, name, self.now, **({"max_new": 1} | more)))
        return Rid(f"p{number}")

    def computed(self, number: int, ended: str | None = None) -> Handle:
        """Prefill has computed the prompt and answered; what the answer names."""
        rid = Rid(f"p{number}")
        self.p.take(Sampled(rid=rid, token=7, ended=ended))
        self.p.take(Released(rid=rid))
        self.handles[number] = self.handle(number)
        return self.handles[number]

    def hold(self, number: int, tokens: int = 40, name: bytes = b"prompt", **more: object) -> Handle:
        """Leg 1 as a whole."""
        self.ask(number, tokens, name, **more)
        return self.computed(number)

    def handle(self, number: int) -> Handle:
        """As the worker's edge reads it out of the answered kv_transfer_params."""
        (held,) = [answer for answer in self.p.all(AnswerHeld) if answer.rid == f"p{number}"]
        row, node = held.row, self.prefill
        return Handle(
            instance=node.instance,
            hold=held.hold,
            pages=held.pages,
            prompt=PromptId(row.prompt_digest, row.prompt_tokens),
            endpoints=tuple((Rank(tp=tp), self.port(tp)) for tp in range(self.tp[0])),
            shape=Shape(tp=self.tp[0]),
            dp=0,
            lease_s=held.lease_s,
            rid=held.rid,
        )

    # --- leg 2 ------------------------------------------------------------------------------------------------------

    def second(self, number: int, handle: Handle | None = None, *, box: Box | None = None, **more: object) -> Rid:
        """Leg 2 is at decode, with what leg 1 was answered, or another handle; `rid` names it where "d<n>" does not."""
        handle = handle or self.handles[number]
        rid = str(more.pop("rid", f"d{number}"))
        given = {"tokens": handle.prompt.tokens, "name": handle.prompt.digest} | more
        (box or self.d).take(request(rid, now=self.now, handle=handle, **given))  # type: ignore[arg-type]
        return Rid(rid)

    def read(self, number: int, handle: Handle | None = None, **more: object) -> Rid:
        """Leg 2 is at decode and all frames are delivered: its pages are asked for, where there is room."""
        rid = self.second(number, handle, **more)  # type: ignore[arg-type]
        self.pump()
        return rid

    def whole(self, number: int, tokens: int = 40, name: bytes = b"prompt", **more: object) -> Rid:
        """Both legs, until the request runs and is confirmed."""
        self.hold(number, tokens, name, **more)
        rid = self.read(number, **more)
        self.land_all()
        self.pump()
        return rid

    def land_pages(self, number: int, count: int, link: int = 0) -> None:
        """The first `count` pages of this load are visible at decode, as far as one link brings them."""
        reader = self.reader(number)
        self.d.take(PagesLanded(reader.grant, reader.links[link], reader.blocks[:count]))

    def close_fences(self, number: int) -> None:
        reader = self.reader(number)
        for here, kind in reader.gates:
            self.d.take(GrantQuiet(reader.grant, here, kind))

    def let_go(self, number: int, error: str = "") -> None:
        """Decode's engine has ended this request."""
        self.d.take(Released(rid=Rid(f"d{number}"), error=error))

    def decoded(self, number: int, tokens: int) -> None:
        self.d.take(Computed(rid=Rid(f"d{number}"), tokens=tokens))

    def laid_aside(self, number: int, tokens: int) -> None:
        self.d.take(Retracted(rid=Rid(f"d{number}"), tokens=tokens))

    def leave(self, box: Box, rid: str) -> list[Effect]:
        """The client of this leg has left."""
        return box.take(Cancel(Rid(rid), client_left(box.node.side)))

    # --- what a test looks at ---------------------------------------------------------------------------------------

    @property
    def decode(self) -> ParamsDecodeNode:  # type: ignore[override]
        assert isinstance(self.d.node, ParamsDecodeNode)
        return self.d.node

    @property
    def prefill(self) -> ParamsPrefillNode:  # type: ignore[override]
        assert isinstance(self.p.node, ParamsPrefillNode)
        return self.p.node

    def holder(self, number: int) -> Holder:
        holder = self.prefill.held.holds.get(HoldNo(number)) or self.prefill.held._over.get(HoldNo(number))
        assert holder is not None
        return holder

    def reader(self, number: int) -> Reader:
        return self.decode.pull.readers[Rid(f"d{number}")]

    def scheduled(self, number: int) -> Scheduled:
        return self.decode.requests[Rid(f"d{number}")]

    def status(self, number: int) -> RequestStatus | None:
        """None: decode is done with it."""
        request = self.decode.requests.get(Rid(f"d{number}"))
        return request.status if request else None

    def states(self, number: int) -> tuple[H, L | None]:
        """Of hold `number` and of the load of "d<number>"; None where that is over."""
        reader = self.decode.pull.readers.get(Rid(f"d{number}"))
        return self.holder(number).state, reader.state if reader else None

    def run_of(self, number: int) -> RunWhole:
        """The last time that this request was given to decode's engine."""
        return [run for run in self.d.all(RunWhole) if run.rid == f"d{number}"][-1]

    def may_leave(self, number: int) -> bool:
        """May a byte of its answer go to the client?"""
        told = [e for e in self.d.log if isinstance(e, (RunWhole, Ungate)) and e.rid == f"d{number}"]
        return bool(told) and (isinstance(told[-1], Ungate) or not told[-1].gated)

    def idle(self) -> bool:
        """Nothing live or held, every page free or cached, no clock but the sessions' and what is owed."""
        for box in self.boxes:
            node = box.node
            assert node.ledger.free_count + node.ledger.counts[Page.CACHED] == node.limits.pages, node.ledger.holders()
            assert node.live == 0, box.node
            left = {key[0] for key in node.timers.running()} - IDLE_KEYS
            assert not left, left
            if isinstance(node, ParamsDecodeNode):
                assert len(node.reserve) == 0
                assert not node.pull.readers
                assert not node.connector.take_output().finished_recving
            elif isinstance(node, ParamsPrefillNode):
                assert not node.held.holds
                assert node.computing == 0
        return True


def request(rid: str, tokens: int, name: bytes, now: float, **more: object) -> RequestArrived:
    """`keys`: what its pages are called in prefix caches; none: nothing is shared or kept."""
    given: dict[str, object] = {"max_new": 4, "deadline": now + 300.0} | more
    keys = str(given.pop("keys", ""))
    given["page_keys"] = tuple(keys[: end + 1].encode() for end in range(min(len(keys), tokens // PAGE)))
    return RequestArrived(rid=Rid(rid), prompt=PromptId(name, tokens), **given)  # type: ignore[arg-type]


class Engines:
    """Both engines of a world, for tests that leave the order to chance: what runs, and may end now."""

    def __init__(self, world: FacingParams) -> None:
        self._world = world
        self.ended: dict[str, int] = {}

    def running(self) -> list[tuple[Box, RunPrefill | RunWhole]]:
        """Every run whose Released has not been said, the last one of each rid."""
        found: list[tuple[Box, RunPrefill | RunWhole]] = []
        for box in self._world.boxes:
            runs: dict[str, list[RunPrefill | RunWhole]] = {}
            for effect in box.log:
                if isinstance(effect, (RunPrefill, RunWhole)):
                    runs.setdefault(effect.rid, []).append(effect)
            found += [(box, each[-1]) for rid, each in runs.items() if len(each) > self.ended.get(rid, 0)]
        return found

    def aborted(self, box: Box, rid: Rid) -> bool:
        """It was told to let go since it was last given this request."""
        told = [e for e in box.log if isinstance(e, (RunPrefill, RunWhole, AbortEngine)) and e.rid == rid]
        return isinstance(told[-1], AbortEngine)

    def aside(self, box: Box, rid: Rid) -> bool:
        told = [e for e in box.log if isinstance(e, (RunWhole, RetractEngine)) and e.rid == rid]
        return isinstance(told[-1], RetractEngine)

    def end(self, box: Box, rid: Rid, error: str = "") -> None:
        self.ended[rid] = self.ended.get(rid, 0) + 1
        box.take(Released(rid=rid, error=error))


Answer = AnswerFailed | AnswerHeld | AnswerRow


def answers(box: Box, rid: str) -> list[Answer]:
    return [a for a in box.log if isinstance(a, (AnswerFailed, AnswerHeld, AnswerRow)) and a.rid == rid]


def cause(code: str = "asked") -> Cause:
    return Cause(code, "as a test has it", 499)


def back(link: Link, here: Instance) -> Link:
    """The same link, as its other end names it."""
    return Link(link.there.rank, Seat(here, link.here))


def pages(*numbers: int) -> tuple[PageId, ...]:
    return tuple(PageId(number) for number in numbers)
