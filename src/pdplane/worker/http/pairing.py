"""Names of samples: rids for all, and on the legs of a pair the room and the prefill's address of each.

Routers send the pairing fields as scalars or as lists, one entry per sample, prompt-major. A scalar room names one
hand-off, so with several samples it is refused rather than counted up: a neighbour's room might be the next number.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

from pdplane.core.errors import Refused, bad_request
from pdplane.core.ids import BadRoom, Rid, Room, parse_room
from pdplane.wire.body import invalid

MAX_NAME = 512


class Pairing(NamedTuple):
    """The fields as they came: nothing is known of their shapes yet."""

    rid: object
    host: object
    port: object
    room: object


class Side(NamedTuple):
    role: str
    default_port: int | None

    @property
    def paired(self) -> bool:
        return self.role != "aggregated"


class Seat(NamedTuple):
    rid: Rid
    room: Room | None = None
    host: str = ""
    port: int | None = None


class Named(NamedTuple):
    request_id: str
    seats: list[Seat]


def name_samples(pairing: Pairing, count: int, request_id: str | None, side: Side) -> Named:
    """Raises Refused (400). Without pairing, on an aggregated worker, the bootstrap fields are not looked at."""
    request, rids = _rids(pairing.rid, count, request_id)
    if not side.paired:
        return Named(request, [Seat(rid) for rid in rids])
    rooms = _rooms(pairing.room, count, side.role)
    hosts = [_host(value, side.role) for value in _spread(pairing.host, count, "bootstrap_host")]
    ports = [_port(value, side.default_port) for value in _spread(pairing.port, count, "bootstrap_port")]
    return Named(request, [Seat(*seat) for seat in zip(rids, rooms, hosts, ports, strict=True)])


def _rids(given: object, count: int, request_id: str | None) -> tuple[str, list[Rid]]:
    """(request id, rids). One rid for several samples names the request, and samples are numbered below it."""
    if isinstance(given, list):
        names = [_rid(value) for value in _spread(given, count, "rid")]
        _refuse_twins(names, "rid")
        return request_id or _mint(), [Rid(name) for name in names]
    if given is None:
        request = request_id or _mint()
        return request, [Rid(f"{request}.{i}.0") for i in range(count)]
    name = _rid(given)
    if count == 1:
        return request_id or name, [Rid(name)]
    return name, [Rid(f"{name}.{i}.0") for i in range(count)]


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
