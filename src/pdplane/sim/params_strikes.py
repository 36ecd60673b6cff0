"""Faults at a decode of the params dialect: what an operator finds there, and what no honest session carries."""

from __future__ import annotations

import msgspec

from pdplane.core.events import FrameIn
from pdplane.core.frames import Confirmed, HoldIdentity
from pdplane.core.ids import GrantNo, Instance
from pdplane.core.pages import Page
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.core.params.table import L


def quarantined(node: ParamsDecodeNode) -> set[GrantNo]:
    rids = {rid for rid, request in node.requests.items() if request.page_state is Page.QUARANTINED}
    return {reader.grant for rid, reader in node.pull.readers.items() if rid in rids}


def stray_answer(node: ParamsDecodeNode, wrong: str) -> FrameIn | None:
    """A CONFIRMED for another grant, or of an earlier process, to a load that waits for one; None where none does."""
    for reader in node.pull.readers.values():
        if reader.state not in (L.READING, L.CONFIRMING):
            continue
        link = reader.links[0]
        conn = node.pull.members.conn(link)
        if conn is None:
            continue
        there = link.there
        named = HoldIdentity(
            hold=reader.handle.hold, grant=reader.grant, src=there.instance, dst=node.instance, rank=there.rank
        )
        frame = Confirmed(**named)
        if wrong == "instance":
            return FrameIn(conn, msgspec.structs.replace(frame, src=Instance(f"{there.instance} before")))
        return FrameIn(conn, msgspec.structs.replace(frame, grant=GrantNo(frame.grant + 1000)))
    return None
