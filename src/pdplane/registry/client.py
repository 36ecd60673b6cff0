"""The registry's client: what a prefill says there, and what a decode asks. Works against SGLang's registry too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TypeVar

import httpx

from pdplane.core.ids import Rank, Room
from pdplane.wire import registry as wire
from pdplane.wire.registry import PrefillRegistration, PrefillServerInfo, RankEndpoint, RegistryStatus

TIMEOUT_S = 5.0

T = TypeVar("T")


class RegistryError(Exception):
    """What the registry could not do; the message names its address and the remedy."""


class RegistryUnavailable(RegistryError):
    """No registry answers there, or not as one. Trying again is safe."""


class NotRegisteredYet(RegistryError):
    """The prefill group is not whole yet. Trying again is the remedy."""


class NoSuchRank(RegistryError):
    """The group is whole and has no such rank: trying again will not help."""


class RegistryRefused(RegistryError):
    """The registry does not take what was sent (4xx)."""


class NotOurRegistry(RegistryRefused):
    """It has no routes beyond SGLang's: ask by those."""


class RegistryClient:
    """`base_url` like http://host:8998. Keeps connections alive. Safe to use from many tasks of one loop; close it, or
    use `async with`."""

    def __init__(self, base_url: str, *, token: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self.base_url = base_url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
            verify=self.base_url.startswith("https:"),  # reading the trusted certificates takes 75 ms of the loop
        )

    async def __aenter__(self) -> RegistryClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # --- prefill ---

    async def register(self, registration: PrefillRegistration) -> None:
        """Idempotent."""
        await self._call("PUT", "/route", body=registration)

    async def deregister(self, instance: str | None) -> int:
        """How many ranks left. Raises NotOurRegistry where SGLang's answers."""
        answer = await self._call("DELETE", "/v1/route", body=wire.Deregister(instance))
        return self._read(wire.Removed, answer).removed

    async def register_dp_rank(self, room: Room, dp_rank: int) -> None:
        await self._call("POST", "/register_dp_rank", body=wire.RegisterDpRank(room, dp_rank))

    async def register_dp_ranks(self, taken: Mapping[Room, int]) -> None:
        """All of these rooms in one call. Raises NotOurRegistry where SGLang's answers."""
        rooms = [wire.RegisterDpRank(room, dp_rank) for room, dp_rank in taken.items()]
        await self._call("POST", "/v1/dp_ranks", body=wire.RegisterDpRanks(rooms))

    # --- decode ---

    async def server_info(self) -> PrefillServerInfo:
        return self._read(PrefillServerInfo, await self._route(Rank(-1, -1, -1, -1)))

    async def rank_endpoint(self, rank: Rank) -> RankEndpoint:
        return self._read(RankEndpoint, await self._route(rank))

    async def query_dp_ranks(self, rooms: Iterable[Room]) -> dict[Room, int]:
        """Unknown rooms are left out."""
        answer = await self._call("POST", "/query_dp_ranks", body=wire.QueryDpRanks(list(rooms)))
        return {Room(int(room)): dp_rank for room, dp_rank in self._read(dict[str, int], answer).items()}

    async def status(self) -> RegistryStatus:
        """Who is there and who is missing. Raises NotOurRegistry where SGLang's answers."""
        return self._read(RegistryStatus, await self._call("GET", "/v1/registry"))

    async def _route(self, rank: Rank) -> bytes:
        coordinate = f"prefill_dp_rank={rank.dp}&prefill_cp_rank={rank.cp}"
        return await self._call("GET", f"/route?{coordinate}&target_tp_rank={rank.tp}&target_pp_rank={rank.pp}")

    async def _call(self, method: str, path: str, body: object | None = None) -> bytes:
        content = None if body is None else wire.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            answer = await self._http.request(method, path, content=content, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise RegistryUnavailable(
                f"no registry answers at {self.base_url}: {reason}; is the prefill up, and is this its bootstrap port?"
            ) from None
        if answer.status_code != 200:
            if answer.status_code == 404 and path.startswith("/v1/"):
                raise NotOurRegistry(f"registry {self.base_url} has no {path}: it speaks SGLang's routes alone")
            raise self._error(answer.status_code, answer.text.strip()[:500])
        return answer.content

    def _error(self, status: int, text: str) -> RegistryError:
        if status == 503:
            return NotRegisteredYet(
                f"registry {self.base_url}: {text} Wait for all ranks of the prefill, or start them."
            )
        if status == 404 and text.startswith("Bootstrap info not found"):
            return NoSuchRank(f"registry {self.base_url}: {text}; the prefill has no such rank, compare its sizes")
        if status == 401:
            return RegistryRefused(f"registry {self.base_url} needs its write token: give it to this worker")
        if 400 <= status < 500:
            return RegistryRefused(f"registry {self.base_url} refuses: {status} {text}")
        return RegistryUnavailable(f"registry {self.base_url} fails: {status} {text}; look at its log")

    def _read(self, kind: type[T], answer: bytes) -> T:
        try:
            return wire.decode(kind, answer)
        except wire.BadBody as error:
            raise RegistryUnavailable(
                f"what answers at {self.base_url} is no registry: {error}; is this the bootstrap port?"
            ) from None
