"""What the router must know of a request's body, and what it writes into it. The rest passes through byte for byte.

A body is read into the few fields below, others are skipped. Fields that name the hand-off's topology are not a
client's to set: they are removed (the slow path, counted). The router's own are appended before the last brace.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdplane.core.errors import Refused, bad_request
from pdplane.wire.body import NOT_JSON, read_with_headroom
from pdplane.wire.sampling import MAX_SAMPLES

TOPOLOGY = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "kv_transfer_params",
    "disagg_prefill_dp_rank",
    "routed_dp_rank",
    "data_parallel_rank",
    "decode_tp_size",
    "decode_allocation_policy",
    "rid",
)
"""Stripped at the public edge; `rid` is kept as the client's label."""

_UNSET = msgspec.UNSET
_NO_RAW = msgspec.Raw(b"")
_BARE = b"{ \t\r\n"  # what may stand before the last brace of an empty object


class Needed(msgspec.Struct, gc=False):
    """The fields that decide how a request is sent. Types are the worker's business, hence Any."""

    n: Any = 1
    stream: Any = False
    prompt: msgspec.Raw = _NO_RAW
    text: msgspec.Raw = _NO_RAW
    input_ids: msgspec.Raw = _NO_RAW
    sampling_params: msgspec.Raw = _NO_RAW
    rid: Any = _UNSET
    bootstrap_host: Any = _UNSET
    bootstrap_port: Any = _UNSET
    bootstrap_room: Any = _UNSET
    bootstrap_pair_key: Any = _UNSET
    kv_transfer_params: Any = _UNSET
    disagg_prefill_dp_rank: Any = _UNSET
    routed_dp_rank: Any = _UNSET
    data_parallel_rank: Any = _UNSET
    decode_tp_size: Any = _UNSET
    decode_allocation_policy: Any = _UNSET

    def untouched(self) -> bool:
        """No field of TOPOLOGY is there. Spelled out: it runs for every request."""
        return (
            self.rid is _UNSET
            and self.bootstrap_host is _UNSET
            and self.bootstrap_port is _UNSET
            and self.bootstrap_room is _UNSET
            and self.bootstrap_pair_key is _UNSET
            and self.kv_transfer_params is _UNSET
            and self.disagg_prefill_dp_rank is _UNSET
            and self.routed_dp_rank is _UNSET
            and self.data_parallel_rank is _UNSET
            and self.decode_tp_size is _UNSET
            and self.decode_allocation_policy is _UNSET
        )


class _Sampling(msgspec.Struct):
    n: Any = 1


class Body(msgspec.Struct, gc=False):
    """A request's body, ready for the router's fields. `samples` rooms are needed, in lists where there are several.

    `prompt_tokens` is the length of the longest prompt where it came as token ids, else 0, and `prompt_name` where in
    the body it is; `prefix` is all of the body but its last brace, with a comma where one is needed. `odd_n`: how many
    choices are wanted is not understood here, and counts as one.
    """

    prefix: bytes
    samples: int = 1
    label: str = ""
    stripped: tuple[str, ...] = ()
    prompt_tokens: int = 0
    prompt_name: str = "prompt"
    odd_n: bool = False

    def plain(self) -> bytes:
        """All of the body, with nothing of the router's."""
        return self.prefix.removesuffix(b",") + b"}"

    def with_fields(self, added: dict[str, msgspec.Raw]) -> bytes:
        """The body as it came, with these fields after its own."""
        return self.prefix + _encode(added)[1:] if added else self.plain()

    def fields(self) -> dict[str, msgspec.Raw]:
        """By name, values as they came; after `check`."""
        return _fields.decode(self.plain())

    def check(self) -> None:
        """Raises Refused (400) where the body cannot be read whole: the first look skips what nobody needs."""
        _read_fields(self.plain())


_needed = msgspec.json.Decoder(Needed)
_sampling = msgspec.json.Decoder(_Sampling)
_array = msgspec.json.Decoder(list[msgspec.Raw])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


def read_body(raw: bytes, max_samples: int = 1024) -> Body:
    """Raises Refused (400): not a JSON object, or too many samples. Wrong types and values are left to the worker."""
    try:
        needed = read_with_headroom(_needed.decode, raw)
    except NOT_JSON as error:
        raise _no_object(raw, error) from None
    if needed.untouched():
        end = raw.rindex(b"}")
        body = Body(raw[:end] + b"," if raw[end - 1] not in _BARE else _prefix(raw))
    else:
        stripped = tuple(name for name in TOPOLOGY if getattr(needed, name) is not _UNSET)
        label = needed.rid if isinstance(needed.rid, str) else ""
        body = Body(_prefix(_without(raw, stripped)), label=label, stripped=stripped)
    _count_samples(body, needed, max_samples)
    return body


def _read_fields(raw: bytes) -> dict[str, msgspec.Raw]:
    try:
        return read_with_headroom(_fields.decode, raw)
    except NOT_JSON as error:
        raise _no_object(raw, error) from None


def _no_object(raw: bytes, error: Exception) -> Refused:
    if isinstance(error, msgspec.ValidationError) and not raw.lstrip().startswith(b"{"):
        return Refused(bad_request("the request body must be a JSON object", code="invalid_json"))
    return Refused(bad_request(f"the request body is not valid JSON: {error}", code="invalid_json"))


def _without(raw: bytes, names: tuple[str, ...]) -> bytes:
    fields = _read_fields(raw)
    for name in names:
        fields.pop(name, None)
    return _encode(fields)


def _prefix(raw: bytes) -> bytes:
    end = raw.rindex(b"}")
    return raw[:end] + (b"" if raw[:end].rstrip().endswith(b"{") else b",")


def _count_samples(body: Body, needed: Needed, max_samples: int) -> None:
    """A batch or n>1 is one sample per prompt and choice; what the worker will refuse anyway stays scalar."""
    prompts = 1
    given = needed.prompt or needed.input_ids or needed.text
    if given:
        body.prompt_name = "input_ids" if given is needed.input_ids else "prompt"
        prompts = _count_prompts(body, given)
    n = needed.n
    if n == 1 and not given and not needed.sampling_params:
        return
    if needed.sampling_params and _first(needed.sampling_params) == "{":
        n = _choices_of(needed.sampling_params)
    if n.__class__ is not int or not 1 <= n <= MAX_SAMPLES:
        body.odd_n = n is not None
        n = 1
    body.samples = prompts * n
    if body.samples > max_samples:
        raise Refused(
            bad_request(
                f"{prompts} prompts x n={n} is {body.samples} samples, over the limit of {max_samples}; send fewer",
                code="too_many_samples",
                param="n" if n > 1 else "prompt",
            )
        )


def _choices_of(sampling_params: msgspec.Raw) -> Any:
    """Its `n`; what cannot be read is as odd as any other value, and left to the worker."""
    try:
        return _sampling.decode(sampling_params).n
    except NOT_JSON:
        return ""


def _count_prompts(body: Body, given: msgspec.Raw) -> int:
    """How many prompts a ``prompt``, ``text`` or ``input_ids`` holds: a list of strings or of id lists is a batch."""
    if _first(given) != "[":
        return 1
    items = _array.decode(given)
    if not items:
        return 1
    first = _first(items[0])
    if first in ('"', "["):
        if first == "[":
            counts = [bytes(item).count(b",") + 1 for item in items]
            body.prompt_tokens = max(counts)
            body.prompt_name += f"[{counts.index(body.prompt_tokens)}]"
        return len(items)
    body.prompt_tokens = len(items)
    return 1


def samples_of(body: Body, *, chat: bool) -> tuple[list[Body], int]:
    """A body of several samples as one for each, prompt-major, and how many there are of each prompt. Sample k of a
    seeded prompt has the seed + k, as where one worker has them all."""
    fields = body.fields()
    n = _whole(fields.pop("n", None)) or 1
    seed = _whole(fields.get("seed"))
    given = fields.get("prompt", _NO_RAW)
    items = _array.decode(given) if not chat and given and _first(given) == "[" else []
    one_kind = {_first(item) for item in items} in ({'"'}, {"["})  # a mixture is a worker's to refuse
    prompts: list[msgspec.Raw | None] = list(items) if one_kind else [None]
    bodies = []
    for i, prompt in enumerate(prompts):
        tokens = 0 if prompt is None else bytes(prompt).count(b",") + 1 if _first(prompt) == "[" else 0
        for k in range(n):
            own = fields if prompt is None else fields | {"prompt": prompt}
            if k and seed is not None:
                own = own | {"seed": msgspec.Raw(str((seed + k) % 2**63).encode())}
            one = Body(_prefix(_encode(own)), prompt_tokens=tokens if prompt else body.prompt_tokens)
            one.prompt_name = body.prompt_name if prompt is None else f"prompt[{i}]"
            bodies.append(one)
    return bodies, n


def _whole(raw: msgspec.Raw | None) -> int | None:
    """An integer field's value; None where it is absent or no integer."""
    try:
        value = msgspec.json.decode(raw) if raw else None
    except NOT_JSON:
        return None  # out of range, say: a worker's to refuse
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _first(raw: msgspec.Raw) -> str:
    """The first character of a value: says of which kind it is."""
    return chr(memoryview(raw)[0])
