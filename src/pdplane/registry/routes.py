"""The registry's routes: a request and the time in, an answer out. Sans-IO."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from urllib.parse import parse_qs

from pdplane.core.ids import Rank
from pdplane.wire import registry as wire

from .http import JSON, TEXT, Request, Response
from .refused import RouteRefused
from .rooms import RoomTable, room_of
from .table import RouteTable

OK = Response(200, b"OK")
WHOLE_GROUP = Rank(-1, -1, -1, -1)
_COORDINATE = (b"prefill_dp_rank", b"prefill_cp_rank", b"target_tp_rank", b"target_pp_rank")


class Routes:
    """`write_token` "" lets anyone register; else what writes (all but GET and queries) needs it as a Bearer token."""

    def __init__(self, table: RouteTable, rooms: RoomTable, clock: Callable[[], float], write_token: str = "") -> None:
        self._table = table
        self._rooms = rooms
        self._clock = clock
        self._now = clock()
        self._bearer = f"Bearer {write_token}".encode() if write_token else b""
        self._routes: dict[bytes, dict[bytes, Callable[[Request], Response]]] = {
            b"/route": {b"GET": self._get_route, b"PUT": self._write(self._put_route)},
            b"/health": {b"GET": lambda _request: OK},
            b"/register_dp_rank": {b"POST": self._write(self._register_dp_rank)},
            b"/query_dp_ranks": {b"POST": self._query_dp_ranks},
            b"/v1/registry": {b"GET": self._status},
            b"/v1/route": {b"DELETE": self._write(self._deregister)},
            b"/v1/dp_ranks": {b"POST": self._write(self._register_dp_ranks)},
        }

    def __call__(self, request: Request) -> Response:
        path, _, request.query = request.url.partition(b"?")
        methods = self._routes.get(path)
        if methods is None:
            return Response(404, b"404: Not Found")
        handler = methods.get(request.method)
        if handler is None:
            return _not_allowed(path, request, methods)
        self._now = self._clock()
        self._table.expire(self._now)
        try:
            return handler(request)
        except RouteRefused as refused:
            return Response(refused.status, str(refused).encode())
        except wire.BadBody as bad:
            return Response(400, str(bad).encode())

    def _write(self, handler: Callable[[Request], Response]) -> Callable[[Request], Response]:
        def guarded(request: Request) -> Response:
            if self._bearer and not hmac.compare_digest(request.authorization, self._bearer):
                return Response(401, b"Unauthorized")
            return handler(request)

        return guarded

    def _get_route(self, request: Request) -> Response:
        rank = _coordinate(request.query)
        body = self._table.server_info() if rank == WHOLE_GROUP else self._table.endpoint(rank)
        return Response(200, wire.encode(body), JSON)

    def _put_route(self, request: Request) -> Response:
        self._table.register(wire.decode(wire.PrefillRegistration, request.body), self._now)
        return OK

    def _register_dp_rank(self, request: Request) -> Response:
        self._take([wire.decode(wire.RegisterDpRank, request.body)])
        return OK

    def _register_dp_ranks(self, request: Request) -> Response:
        self._take(wire.decode(wire.RegisterDpRanks, request.body).rooms)
        return OK

    def _take(self, taken: list[wire.RegisterDpRank]) -> None:
        rooms = [room_of(each.bootstrap_room) for each in taken]
        for each in taken:
            self._table.check_dp_rank(each.dp_rank)
        for room, each in zip(rooms, taken, strict=True):
            self._rooms.put(room, each.dp_rank, self._now)

    def _query_dp_ranks(self, request: Request) -> Response:
        rooms = wire.decode(wire.QueryDpRanks, request.body).bootstrap_rooms
        return Response(200, wire.encode(self._rooms.find(rooms, self._now)), JSON)

    def _status(self, request: Request) -> Response:
        self._rooms.expire(self._now)
        return Response(200, wire.encode(self._table.status(len(self._rooms), self._now)), JSON)

    def _deregister(self, request: Request) -> Response:
        removed = self._table.deregister(wire.decode(wire.Deregister, request.body).pd_instance)
        return Response(200, wire.encode(wire.Removed(removed)), JSON)


def _not_allowed(path: bytes, request: Request, methods: dict[bytes, Callable[[Request], Response]]) -> Response:
    """SGLang's /route says it in words under a JSON type; elsewhere HEAD is a GET without its body."""
    if path == b"/route":
        return Response(405, b"Method not allowed", JSON)
    if request.method == b"HEAD" and b"GET" in methods:
        answer = methods[b"GET"](request)
        return Response(answer.status, answer.body, answer.content_type)
    return Response(405, b"405: Method Not Allowed", TEXT)


def _coordinate(query: bytes) -> Rank:
    given = dict(pair.partition(b"=")[::2] for pair in reversed(query.split(b"&")))  # the first of a name stays
    texts = [given.get(name, b"").decode("latin-1") for name in _COORDINATE]
    if not all(texts):
        texts = _unescaped(query.decode("latin-1"))
    if not all(texts):
        raise RouteRefused(400, "Missing inputs for bootstrap server.")
    try:
        return Rank(*(int(text) for text in texts))
    except ValueError:
        named = ", ".join(f"{name.decode()}={text!r}" for name, text in zip(_COORDINATE, texts, strict=True))
        raise RouteRefused(400, f"Inputs for bootstrap server must be integers: {named}") from None


def _unescaped(query: str) -> list[str]:
    """The slow way, for who escapes the names."""
    given = parse_qs(query)
    return [given.get(name.decode(), [""])[0] for name in _COORDINATE]
