"""Decode's question to a prefill's registry: is it one to pair with, and where does it listen."""

from __future__ import annotations

from pdplane.core.errors import Cause, Refused, unavailable
from pdplane.core.events import ControlEndpoint
from pdplane.core.ids import Rank
from pdplane.registry.client import NotRegisteredYet, RegistryClient, RegistryError, RegistryUnavailable
from pdplane.wire.registry import PrefillServerInfo

LOOKUP_TIMEOUT_S = 3.0
POLICY = "early"


async def find_ranks(address: str) -> tuple[tuple[Rank, ControlEndpoint], ...]:
    """The rank of the prefill whose registry is at `address`: groups of several are refused, since a grant's pages land
    from one. Raises Refused, naming the remedy."""
    try:
        async with RegistryClient(f"http://{address}", timeout_s=LOOKUP_TIMEOUT_S) as registry:
            info = await registry.server_info()
            _check(info, address)
            endpoint = await registry.rank_endpoint(Rank())
            return ((Rank(), ControlEndpoint(endpoint.host, endpoint.port)),)
    except NotRegisteredYet as error:
        raise Refused(unavailable("prefill_not_ready", str(error), side="prefill")) from None
    except RegistryUnavailable as error:
        raise Refused(unavailable("registry_unreachable", str(error), side="prefill")) from None
    except RegistryError as error:
        raise Refused(Cause("registry_refused", str(error), 502, retryable=True, side="prefill")) from None


def _check(info: PrefillServerInfo, address: str) -> None:
    if info.decode_allocation_policy != POLICY:
        raise Refused(
            Cause(
                "incompatible",
                f"decode_allocation_policy differs: prefill at {address} has {info.decode_allocation_policy!r}, "
                f"decode has {POLICY!r}; start both with the same",
                503,
                side="decode",
            )
        )
    ranks = info.attn_tp_size * info.attn_cp_size * info.pp_size
    if ranks != 1:
        text = f"the prefill at {address} has {ranks} ranks; this decode takes pages from one"
        raise Refused(Cause("incompatible", text, 503, side="decode"))
    if info.dp_size != 1:
        text = f"the prefill at {address} has {info.dp_size} data-parallel ranks; this decode pairs with one"
        raise Refused(Cause("incompatible", text, 503, side="decode"))
