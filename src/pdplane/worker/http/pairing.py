"""Names of samples: rids for all, and on the legs of a pair the room and the prefill's address of each.

Routers send the pairing fields as scalars or as lists, one entry per sample, prompt-major. A scalar room names one
hand-off, so with several samples it is refused rather than counted up: a neighbour's room might be the next number.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from typing import NamedTuple

import msgspec

from pdplane.core.errors import Refused, bad_request
from pdplane.core.ids import BadRoom, Rid, Room, parse_room
from pdplane.wire.body import NOT_JSON, invalid
from pdplane.wire.legs import LegFields

MAX_NAME = 512

_ATTEMPT = re.compile(r"(?P<request>.+)\.[0-9]+\.[0-9]+", re.DOTALL)


class Side(NamedTuple):
    role: str
    default_port: int | None
    by_room: bool = False


class SampleName(NamedTuple):
    rid: Rid
    room: Room | None = None
    host: str = ""
    port: int | None = None


class Named(NamedTuple):
    request_id: str
    samples: list[SampleName]


def name_samples(fields: LegFields, count: int, label: str | None, side: Side) -> Named:
    """`label`: the client's own id for the request. Raises Refused (400). Only where legs go by room the bootstrap
    fields are looked at."""
    request, rids = _rids(fields.rid, count, label)
    if not side.by_room:
        return Named(request, [SampleName(rid) for rid in rids])
    if fields.bootstrap_room is None and fields.kv_transfer_params is not None:
        text = "kv_transfer_params are of the params dialect, and this worker speaks rooms; start both sides with"
        raise invalid(f"{text} --dialect params", "kv_transfer_params", code="wrong_dialect")
    rooms = _rooms(fields.bootstrap_room, count, side.role)
    hosts = [_host(value, side.role) for value in _spread(fields.bootstrap_host, count, "bootstrap_host")]
    ports = [_port(value, side.default_port) for value in _spread(fields.bootstrap_port, count, "bootstrap_port")]
    return Named(request, [SampleName(*name) for name in zip(rids, rooms, hosts, ports, strict=True)])


def _rids(given: object, count: int, label: str | None) -> tuple[str, list[Rid]]:
    """(request id, rids). Rids of a router's form name their request themselves, and that is the id which client and
    router know; then the client's label does. One rid for several samples is the request's, samples are numbered below
    it."""
    if given is None:
        minted = _mint()  # a label may come again, a rid never does
        return label or minted, [Rid(f"{minted}.{i}.0") for i in range(count)]
    if not isinstance(given, list) and count > 1:
        request = _rid(given)
        return request, [Rid(f"{request}.{i}.0") for i in range(count)]
    rids = [_rid(value) for value in _spread(given, count, "rid")]
    _refuse_twins(rids, "rid")
    own = rids[0] if count == 1 else _mint()
    return _common_request(rids) or label or own, [Rid(rid) for rid in rids]


def _common_request(rids: list[str]) -> str | None:
    """The request of which all `rids` are attempts, in the form ``<request>.<sample>.<attempt>``."""
    found = {_ATTEMPT.fullmatch(rid) for rid in rids}
    requests = {match and match["request"] for match in found}
    return requests.pop() if len(requests) == 1 else None


def _rooms(given: object, count: int, role: str) -> list[Room]:
    if given is None:
        message = (
            f"request without bootstrap room: a {role} worker serves one leg of a pair. Send the request to the "
            "router, or give bootstrap_host, bootstrap_port and bootstrap_room to both legs"
        )
        raise invalid(message, "bootstrap_room", code="missing_required_parameter")
    if not isinstance(given, list) and count > 1:
        raise invalid(f"bootstrap_room: {count} samples need a list of {count} rooms", "bootstrap_room")
    try:
        rooms = [parse_room(value) for value in _spread(given, count, "bootstrap_room")]
    except BadRoom as error:
        raise invalid(str(error), "bootstrap_room", code="invalid_room") from None
    _refuse_twins(rooms, "bootstrap_room")
    return rooms


class _Rooms(msgspec.Struct):
    bootstrap_room: object = None


_named_rooms = msgspec.json.Decoder(_Rooms)


def rooms_of(body: bytes) -> list[Room]:
    """The rooms that a body names which was refused for whatever reason, as far as they can be read."""
    try:
        given = _named_rooms.decode(body).bootstrap_room
    except NOT_JSON:
        return []
    rooms = []
    for value in given if isinstance(given, list) else [given]:
        with contextlib.suppress(BadRoom):
            rooms.append(parse_room(value))
    return rooms


def _spread(value: object, count: int, name: str) -> list[object]:
    """One entry per sample: a list as it is, anything else for all of them."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise invalid(f"{name} has {len(value)} entries for {count} samples (prompts x n)", name)
    return value


def _refuse_twins(values: list[Room] | list[str], name: str) -> None:
    seen: set[Room | str] = set()
    for value in values:
        if value in seen:
            raise invalid(f"{name} {value!r} is given twice; each sample needs its own", name)
        seen.add(value)


def _rid(value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > MAX_NAME:
        raise invalid(f"rid must be a string of 1 to {MAX_NAME} characters, got {_shown(value)}", "rid")
    return value


def _host(value: object, role: str) -> str:
    """Decode must know whom to ask; a prefill is itself the host that is meant."""
    if value is None and role == "prefill":
        return ""
    if not isinstance(value, str) or not value:
        raise invalid(f"bootstrap_host must name the prefill's host, got {_shown(value)}", "bootstrap_host")
    return value


def _port(value: object, default: int | None) -> int | None:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise invalid(f"bootstrap_port must be between 1 and 65535 or null, got {_shown(value)}", "bootstrap_port")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _mint() -> str:
    return uuid.uuid4().hex


def check_request_id(value: str | None) -> str | None:
    """The header x-request-id, "" being none. Raises Refused (400)."""
    if value is not None and len(value) > MAX_NAME:
        raise Refused(bad_request(f"x-request-id is over {MAX_NAME} characters", param="x-request-id"))
    return value or None
