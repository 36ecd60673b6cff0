"""What must hold of holds in every run of the params dialect, by what is said and done; no machine is asked.

consumer  one hold, one consumer: prefill confirms it to one, and one request alone is answered from it. Whoever comes
          with a spent handle, or with one that was never given, is refused: computing the prompt would hide it.
confirm   CONFIRM is asked when every page that will be used has come, and answered with yes only for what is held
          then; nothing of an answer leaves before that yes.
prompt    a hold serves the prompt that it is of.
lease     a hold ends with its lease, and once; a renewal moves the end of what is held, and revives nothing.
back      where a request is over for its client, or given up at decode, both sides have its pages back soon.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdplane.core.effects import (
    AnswerFailed,
    AnswerHeld,
    ArmGrant,
    Count,
    Effect,
    Lane,
    Note,
    RunWhole,
    SendFrame,
    Ungate,
)
from pdplane.core.events import Event, FrameIn, Handle, HandleRefused, RequestArrived
from pdplane.core.frames import Confirm, Confirmed, PromptId, Renewed
from pdplane.core.ids import GrantNo, HoldNo, Instance, PageId, Rid

from .checkers import Pages, Violation, Watched
from .content import PAGE_SIZE
from .drawn import Plan
from .engine import STEP_S

Name = tuple[Instance, HoldNo]
NEVER_HIDDEN = frozenset({"spent", "unknown_hold", "invalid_params", "prompt_mismatch"})
NEAR_S = 2.0  # to have pages back, where all are alive and near


class _Hold(msgspec.Struct):
    rid: Rid
    prompt: PromptId
    until: float
    over: bool = False
    consumer: tuple[Instance, GrantNo] | None = None
    answered: Rid | None = None  # which request at decode lives from it


class _Load(msgspec.Struct):
    """What one request at decode reads, and what is known of it."""

    handle: Handle
    prompt: PromptId
    grant: GrantNo | None = None
    lanes: tuple[Lane, ...] = ()
    used: set[PageId] = set()  # by the engine
    whole: set[PageId] | None = None  # what had come when CONFIRM was asked
    confirmed: bool = False


class HoldRules:
    def __init__(self, plan: Plan, pages: Pages) -> None:
        self._plan, self._pages = plan, pages
        self._holds: dict[Name, _Hold] = {}
        self._of_rid: dict[tuple[Instance, Rid], Name] = {}
        self._loads: dict[tuple[Instance, Rid], _Load] = {}
        self._of_grant: dict[tuple[Instance, GrantNo], _Load] = {}
        self._prompts: dict[Rid, PromptId] = {}
        self._arrived: dict[Rid, float] = {}
        self._reading: Rid | None = None
        self._given_up: dict[Name, float] = {}  # by the decode that was to read it
        self._lease_slack_s = 1.0 + plan.trouble_s
        self.back_s = _back_s(plan)

    # --- what is watched --------------------------------------------------------------------------------------------

    def event(self, who: Watched, event: Event, now: float) -> None:
        match event:
            case RequestArrived(rid=rid, prompt=prompt, handle=handle):
                self._prompts[rid], self._arrived[rid] = prompt, now
                if handle is not None:
                    self._loads[who.instance, rid] = _Load(handle, prompt)
            case HandleRefused(handle=handle):
                self._give_up(handle, now)
            case FrameIn(frame=Confirmed(refusal=None) as frame):
                load = self._of_grant.get((who.instance, frame.grant))
                if load and (frame.src, frame.hold) == (load.handle.instance, load.handle.hold):
                    load.confirmed = load.whole is not None
            case _:
                pass

    def effect(self, who: Watched, effect: Effect, now: float) -> None:
        me = who.instance
        match effect:
            case AnswerHeld(rid, _, hold, _, lease_s):
                self._held(me, rid, hold, now + lease_s)
            case Note(rid, _, "freed") if who.side == "prefill":
                self._freed(me, rid)
            case Note(rid, _, "Reading") if who.side == "decode":
                self._reading = rid
            case ArmGrant(grant, _, lanes) if self._reading is not None:
                load = self._loads[me, self._reading]
                load.grant, load.lanes, self._reading = grant, lanes, None
                self._of_grant[me, grant] = load
            case SendFrame(_, frame):
                self._said(me, frame, now)
            case RunWhole():
                self._runs(me, effect)
            case Ungate(rid):
                self._lives_from(me, rid)
            case AnswerFailed(rid, cause) if who.side == "decode" and cause.code not in NEVER_HIDDEN:
                if failed := self._loads.get((me, rid)):
                    self._give_up(failed.handle, now)
            case Count("recompute", code) if code in NEVER_HIDDEN:
                raise Violation("consumer", f"{me} computes a prompt itself that came with a handle that is {code}")
            case _:
                pass

    def _said(self, me: Instance, frame: object, now: float) -> None:
        match frame:
            case Confirm(grant=grant):
                load = self._of_grant[me, grant]
                if load.whole is None:
                    load.whole = self._pages.whole(me, grant, load.lanes)
            case Confirmed(refusal=None):
                self._confirmed(me, frame)
            case Renewed(holds=holds, lease_s=lease_s):
                self._renewed(me, holds, now + lease_s)
            case _:
                pass

    # --- rules ------------------------------------------------------------------------------------------------------

    def _held(self, me: Instance, rid: Rid, hold: HoldNo, until: float) -> None:
        if (me, hold) in self._holds:
            raise Violation("lease", f"{me} gives hold number {hold} a second time")
        self._holds[me, hold] = _Hold(rid, self._prompts[rid], until)
        self._of_rid[me, rid] = me, hold

    def _give_up(self, handle: Handle, now: float) -> None:
        """Decode has no use for it; not where it names somebody else's hold."""
        name = handle.instance, handle.hold
        if name in self._holds and self._holds[name].rid == handle.rid:
            self._given_up.setdefault(name, now)

    def _freed(self, me: Instance, rid: Rid) -> None:
        name = self._of_rid.get((me, rid))
        if name is None:
            return  # it never came so far
        if self._holds[name].over:
            raise Violation("lease", f"{me} gives the pages of hold {name[1]} back a second time")
        self._holds[name].over = True

    def _confirmed(self, me: Instance, frame: Confirmed) -> None:
        hold, consumer = self._holds.get((me, frame.hold)), (frame.dst, frame.grant)
        what = f"{me} confirms hold {frame.hold} to {frame.dst}"
        if hold is None:
            raise Violation("confirm", f"{what}, which it never gave")
        if hold.consumer not in (None, consumer):
            raise Violation("consumer", f"{what}, and has confirmed it to {hold.consumer} before")
        if hold.over and hold.consumer is None:
            raise Violation("confirm", f"{what}, whose pages it has given back")
        hold.consumer = consumer

    def _renewed(self, me: Instance, holds: Iterable[HoldNo], until: float) -> None:
        for number in holds:
            hold = self._holds.get((me, number))
            if hold is None or hold.over:
                raise Violation("lease", f"{me} renews hold {number}, which it does not hold")
            hold.until = until

    def _runs(self, me: Instance, run: RunWhole) -> None:
        """The engine begins on what was loaded, if anything of it is used."""
        if run.shared * PAGE_SIZE >= self._prompts[run.rid].tokens if run.rid in self._prompts else False:
            raise Violation("cached", f"{me} lets {run.rid} compute nothing of its own")
        load = self._loads.get((me, run.rid))
        used = set(run.pages[run.shared : -(-run.computed // PAGE_SIZE)])
        if load is None or not used:
            if used:
                raise Violation("O3", f"{me} takes {len(used)} pages of {run.rid} as computed, and nothing was loaded")
            return
        load.used = used
        if not run.gated:
            self._lives_from(me, run.rid)

    def _lives_from(self, me: Instance, rid: Rid) -> None:
        """From here on bytes leave that were computed from what was loaded."""
        load = self._loads[me, rid]
        what = f"{me} answers {rid} from hold {load.handle.hold} of {load.handle.instance}"
        if not load.confirmed:
            raise Violation("confirm", f"{what}, which was not confirmed")
        if load.whole is None or not load.used <= load.whole:
            had = len(load.used & (load.whole or set()))
            raise Violation("confirm", f"{what}: {had} of {len(load.used)} pages had come when it asked")
        hold = self._holds[load.handle.instance, load.handle.hold]
        if hold.answered not in (None, rid):
            raise Violation("consumer", f"{what}, and so was {hold.answered}")
        hold.answered = rid
        if hold.prompt != load.prompt:
            raise Violation("prompt", f"{what}, which is of another prompt")

    # --- time -------------------------------------------------------------------------------------------------------

    def died(self, who: Watched) -> None:
        for (instance, _), hold in self._holds.items():
            hold.over = hold.over or instance == who.instance

    def bounded(self, now: float) -> None:
        """To be called every second or so."""
        for (instance, number), hold in self._holds.items():
            if not hold.over and now > hold.until + self._lease_slack_s:
                text = f"{instance} keeps hold {number} of {hold.rid}, whose lease ended at {hold.until:.1f} s"
                raise Violation("lease", text)
        for (instance, number), since in self._given_up.items():
            given_up = self._holds.get((instance, number))
            if given_up and not given_up.over and now - since > self.back_s:
                text = f"{instance} keeps hold {number} of {given_up.rid}, given up at decode at {since:.1f} s"
                raise Violation("back", f"{text} (bound {self.back_s:.1f} s)")

    def given_back(self, now: float, processes: Iterable[Watched], over_since: dict[Rid, float]) -> None:
        """`over_since`: when the client of a leg was done with it."""
        if not self._plan.router_tells:
            return
        for who in processes:
            for rid in self._pages.held_at(who.instance) if who.alive else ():
                since = max(over_since.get(rid, now), self._arrived.get(rid, 0.0))
                if now - since > self.back_s:
                    text = f"{who.instance} has not given back the pages of {rid}, over since {since:.1f} s"
                    raise Violation("back", f"{text} (bound {self.back_s:.1f} s)")


def _back_s(plan: Plan) -> float:
    """Two seconds with live peers, and what a step and the network take; where anybody may be away, lease and grace."""
    near = NEAR_S + 4 * plan.hop_s[1] + 6 * plan.delay_s[1] + STEP_S[1] * plan.prefill_step
    if plan.calm_network:
        return near
    limits = (plan.prefill_limits, plan.decode_limits)
    grace = plan.prefill_limits.session.silent_s + plan.prefill_limits.session.grace_s
    slow = max((getattr(fault, "extra_s", 0.0) for fault in plan.faults), default=0.0)
    apart = grace + max(one.peer_wait_s for one in limits) + plan.trouble_s
    return near + plan.prefill_limits.hold_term_s + apart + slow
