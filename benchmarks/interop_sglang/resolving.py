"""What both directions have in common: the groups, and that every decode rank finds the ranks that it is due."""

from __future__ import annotations

from peer_process import Peer, Ports
from report import Checks

from pdplane.core.ids import Rank, Shape
from pdplane.core.topology import map_ranks

SHAPES = [Shape(), Shape(tp=2), Shape(dp=2), Shape(dp=2, tp=2)]
DECODES = [Shape(), Shape(tp=2)]
BALANCED = "total_requests"
FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT = 0, 1, 2  # KVPoll


async def all_resolve(peer: Peer, checks: Checks, part: str, port: int, shape: Shape, ports: Ports) -> None:
    """Each rank of each decode finds the ranks that it is due, in the order of the mapping."""
    for decode in DECODES:
        for tp in range(decode.tp):
            for dp in range(shape.dp):
                found = await peer.resolve(port, decode, Rank(tp=tp), dp)
                targets = map_ranks(shape, decode, Rank(tp=tp), dp).targets
                due = (WAITING_FOR_INPUT, [["127.0.0.1", ports[target.rank]] for target in targets])
                name = f"decode tp {tp} of {decode.tp}, dp rank {dp}"
                checks.check(part, name, due, (found.get("status"), found.get("endpoints")))
