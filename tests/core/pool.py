"""One pool with its reserve, batch and door, and hand-offs without a peer: what a test says happens, happens.

`ask` puts a hand-off at the door; `fill` completes it; `compute`, `retract` and `release` are what the engine reports.
"""

from __future__ import annotations

from typing import TypeVar, cast

from pdplane.core.admission import Demand, demand
from pdplane.core.batch import Batch
from pdplane.core.effects import Count, Effect, Note
from pdplane.core.errors import client_left
from pdplane.core.events import Cancel, Computed, Event, LegArrived, Released, Retracted, Tick
from pdplane.core.frames import PromptId, Row
from pdplane.core.ids import NO_GRANT, GrantNo, PageId, Rid, Room
from pdplane.core.node import Limits, Node, TimerKey
from pdplane.core.pages import Owner, Page
from pdplane.core.prompt_pages import Prompt, PromptPages, Taken
from pdplane.core.reserve import Reserve
from pdplane.core.rooms.door import Door
from pdplane.core.rooms.receiver import Receiver
from pdplane.core.rooms.table import RE

E = TypeVar("E")


class HandOff:
    """Stands for a room's receiver at the door: granted, filled, and off into the batch."""

    def __init__(self, node: Pool, leg: LegArrived, need: Demand) -> None:
        self.node, self.leg, self.need = node, leg, need
        self.rid, self.room = leg.rid, leg.room
        self.arrived_at = node.now
        self.grant = NO_GRANT
        self.prompt = Prompt(leg.prompt.tokens, leg.page_keys, len(leg.page_keys))
        self.pages: tuple[PageId, ...] = ()
        self.shared: tuple[PageId, ...] = ()
        self.row: Row | None = None
        self.gone = False

    @property
    def owner(self) -> Owner:
        return Owner(f"grant {self.grant}")

    def take(self, taken: Taken) -> None:
        self.shared, self.pages = taken.pages[: taken.shared], taken.pages[taken.shared :]

    def apply(self, event: RE) -> None:
        match event:
            case RE.PAGES_OK:
                self.node.granted.append(self.rid)
            case RE.BATCH:
                self.node.ledger.shift(self.pages, self.owner, Page.FILLED, Page.ACTIVE)
                self._over()
            case RE.ROW_ENDS:
                pages = self.shared + self.pages
                self.node.pages.keep(self.prompt, pages, len(self.shared), self.owner, Page.FILLED)
                self.let_go()
                self.node.reserve.drop(self.owner)
                self._over()
            case _:
                raise AssertionError(event)

    def let_go(self) -> None:
        """It reads the shared pages no more."""
        self.node.pages.release(self.shared)
        self.shared = ()

    def _over(self) -> None:
        self.gone, self.shared = True, ()
        self.node.door.forget(cast(Receiver, self))


class Pool(Node):
    """The order of work is that of the decode node: growth, those aside, finished hand-offs, newcomers."""

    side = "decode"

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.pages = PromptPages(self.ledger, limits)
        self.reserve = Reserve(self.pages, limits)
        self.batch = Batch(self, self.pages, self.reserve)
        self.door = Door(self, self.pages, self.reserve, self.batch)
        self.offs: dict[str, HandOff] = {}
        self.granted: list[Rid] = []  # in order
        self.log: list[Effect] = []
        self._grants = 0

    # --- what happens -----------------------------------------------------------------------------------------------

    def ask(
        self, name: str, tokens: int, max_new: int, priority: int = 0, deadline: float = 100.0, text: str = ""
    ) -> HandOff:
        """`text`: what the prompt says, a letter for each page; prompts that begin alike share their pages."""
        leg = LegArrived(
            rid=Rid(name),
            room=Room(len(self.offs) + 1),
            prompt=PromptId(b"", tokens),
            max_new=max_new,
            deadline=deadline,
            priority=priority,
            page_keys=tuple(text[: end + 1].encode() for end in range(len(text))),
        )
        off = self.offs[name] = HandOff(self, leg, demand(tokens, max_new, self.limits))
        self.door.push(cast(Receiver, off))
        self.tick()
        return off

    def fill(self, name: str, ended: str | None = None) -> None:
        """The hand-off is complete; `ended`: its row says that the first token was the last."""
        off = self.offs[name]
        self.ledger.shift(off.pages, off.owner, Page.GRANTED, Page.FILLED)
        off.row = Row(prompt_tokens=off.leg.prompt.tokens, prompt_digest=b"", first_token=7, finish_reason=ended)
        self.door.arrived(cast(Receiver, off))
        self.tick()

    def run(
        self, name: str, tokens: int, max_new: int, priority: int = 0, deadline: float = 100.0, text: str = ""
    ) -> None:
        """Let in, filled, and in the batch where it has a place."""
        self.ask(name, tokens, max_new, priority, deadline, text)
        self.fill(name)

    def fail(self, name: str) -> None:
        """The hand-off fails: its pages drain until `prove` or `give_up`."""
        off = self.offs[name]
        self.ledger.shift(off.pages, off.owner, Page.GRANTED, Page.DRAINING)
        off.let_go()
        self.reserve.drop(off.owner)
        self.door.forget(cast(Receiver, off))
        self.tick()

    def prove(self, name: str) -> None:
        self.ledger.free(self.offs[name].pages, self.offs[name].owner)
        self.tick()

    def give_up(self, name: str) -> None:
        self.ledger.shift(self.offs[name].pages, self.offs[name].owner, Page.DRAINING, Page.QUARANTINED)
        self.tick()

    def compute(self, name: str, tokens: int) -> None:
        self.take(Computed(rid=Rid(name), tokens=tokens))

    def retract(self, name: str) -> None:
        """The engine has copied what it has of this request."""
        self.take(Retracted(rid=Rid(name), tokens=self.batch.running[Rid(name)].tokens))

    def release(self, name: str, error: str = "") -> None:
        self.take(Released(rid=Rid(name), error=error))

    def cancel(self, name: str) -> None:
        self.take(Cancel(Rid(name), client_left(self.side)))

    def tick(self, now: float = 0.0) -> None:
        self.take(Tick(), now)

    def take(self, event: Event, now: float = 0.0) -> None:
        self.log += self.handle(event, now)
        assert self.audit() == []

    # --- what a test looks at ---------------------------------------------------------------------------------------

    def rids(self, kind: type[E]) -> list[str]:
        """Whom the effects of this kind name, in order."""
        return [effect.rid for effect in self.log if isinstance(effect, kind)]  # type: ignore[union-attr]

    def held(self, name: str) -> int:
        return len(self.batch.running[Rid(name)].pages)

    def counted(self, name: str) -> list[str]:
        return [effect.label for effect in self.log if isinstance(effect, Count) and effect.name == name]

    def noted(self, name: str) -> list[str]:
        """This request's record."""
        return [effect.state for effect in self.log if isinstance(effect, Note) and effect.rid == name]

    @property
    def live(self) -> int:
        return len(self.batch)

    # --- node -------------------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        heads = [off.shared for off in self.offs.values()]
        return super().audit() + self.pages.audit_all([*heads, *self.batch.heads])

    def _event(self, event: Event) -> None:
        match event:
            case Computed(rid=rid, tokens=tokens):
                self.batch.computed(rid, tokens)
            case Retracted(rid=rid, tokens=tokens):
                self.batch.retracted(rid, tokens)
            case Released(rid=rid, error=error):
                self.batch.released(rid, error)
            case Cancel(rid, cause):
                assert self.batch.cancel(rid, cause)
            case _:
                raise AssertionError(event)

    def _due(self, key: TimerKey) -> None:
        self.batch.overdue(Rid(str(key[1])))

    def _after(self) -> None:
        self.batch.grow()
        self.batch.restore()
        self.door.harvest()
        for receiver in self.door.admit(self._next_grant):
            receiver.apply(RE.PAGES_OK)

    def _next_grant(self) -> GrantNo:
        self._grants += 1
        return GrantNo(self._grants)
