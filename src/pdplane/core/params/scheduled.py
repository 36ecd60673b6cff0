"""One request of decode's scheduler in the params dialect: where it stands, and whether its handle is of its prompt."""

from __future__ import annotations

import msgspec

from ..admission import Demand
from ..batch import Running
from ..errors import Cause, bad_request
from ..events import Handle, RequestArrived
from ..ids import PageId, Rid
from ..layout import pages_for
from ..pages import Owner, Page
from ..prompt_pages import Prompt
from .table import RequestStatus

Status = RequestStatus


class Scheduled(msgspec.Struct, eq=False):
    """One request. While it waits for its place its pages are `granted` in the ledger, the first `shared` of them the
    cache's; once it runs they are the batch's. `tokens`: how many have their KV in the pages, or will have when the
    load is over."""

    arrived: RequestArrived
    since: float
    need: Demand
    prompt: Prompt
    status: RequestStatus = Status.WAITING
    local: bool = False  # it computes its prompt here
    confirmed: bool = True
    pages: tuple[PageId, ...] = ()
    shared: int = 0
    tokens: int = 0
    cause: Cause | None = None  # of a load that failed
    good: int | None = None  # pages of it that are there all the same, where that is known
    restarts: bool = False  # the engine is to let go of it, and it begins anew
    told: bool = False  # the connector knows of its end
    page_state: Page = Page.GRANTED

    @property
    def rid(self) -> Rid:
        return self.arrived.rid

    @property
    def owner(self) -> Owner:
        return Owner(self.arrived.rid)

    @property
    def own(self) -> tuple[PageId, ...]:
        return self.pages[self.shared :]

    @property
    def unplaced(self) -> bool:
        """It waits for its load, and has no pages yet."""
        return self.status is Status.WAITING and not self.pages and not self.local

    @property
    def given_up(self) -> bool:
        """It was told that it fails."""
        return self.status in (Status.FINISHED_ABORTED, Status.FINISHED_ERROR)

    def running(self) -> Running:
        """What the batch keeps of it."""
        tokens = self.arrived.prompt.tokens
        return Running(
            rid=self.rid,
            room=None,
            owner=self.owner,
            pages=list(self.pages),
            most=self.need.most,
            tokens=min(self.tokens, tokens - 1),
            arrived_at=self.since,
            priority=self.arrived.priority,
            prompt=tokens,
            shared=self.shared,
            page_keys=self.arrived.page_keys,
            whole=self.confirmed,
        )


def misfit(arrived: RequestArrived, handle: Handle, page_size: int, side: str) -> Cause | None:
    """The handle is of this very prompt, or nothing is read (rule 2)."""
    ours, theirs = arrived.prompt, handle.prompt
    if ours != theirs:
        text = (
            f"kv_transfer_params are of another prompt: prefill computed {theirs.digest.hex()} of {theirs.tokens} "
            f"tokens, this request has {ours.digest.hex()} of {ours.tokens}; send both legs the same prompt"
        )
        return bad_request(text, code="prompt_mismatch", param="kv_transfer_params", side=side)
    need = pages_for(ours.tokens, page_size)
    if len(handle.pages) == need:
        return None
    text = f"remote_block_ids names {len(handle.pages)} pages, and {ours.tokens} tokens have {need}"
    return bad_request(text, code="invalid_params", param="kv_transfer_params.remote_block_ids", side=side)
