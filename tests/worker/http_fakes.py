"""A tokenizer of bytes and a service of scripts, for the HTTP edge and the engine thread."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Sequence
from typing import Any

from pdplane.core.errors import Cause, Refused
from pdplane.core.frames import TopLogprob
from pdplane.core.ids import Rid
from pdplane.worker.engine import Token
from pdplane.worker.service import Chunk, Generation, Stream

EOS = 256


class ByteStream:
    def __init__(self, skip_special: bool) -> None:
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token == EOS:
            return "" if self._skip_special else "<end>"
        return self._decoder.decode(bytes([token]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """A token a byte; 256 is the end of text. A chat is its turns, one a line; the role "tool" has no place in it."""

    vocab_size = 257

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != EOS).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        return "<end>" if token == EOS else bytes([token]).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return b"<end>" if token == EOS else bytes([token])

    def chat(self, messages: Sequence[dict[str, object]], *, add_generation_prompt: bool = True) -> list[int]:
        if any(message["role"] == "tool" for message in messages):
            raise ValueError("no place for a tool")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + ("assistant: " if add_generation_prompt else ""))

    def stream(self, *, skip_special: bool = True) -> ByteStream:
        return ByteStream(skip_special)


def tokens(text: str, logprob: float | None = None, top: tuple[TopLogprob, ...] = ()) -> list[Token]:
    return [Token(byte, logprob, top) for byte in text.encode()]


def chunk(generation: Generation, text: str, so_far: int = 0, **more: Any) -> Chunk:
    """A chunk of `text`, a token a byte, after `so_far` tokens."""
    given = more.pop("tokens", None)
    new = tokens(text) if given is None else given
    return Chunk(
        text=text,
        tokens=new,
        prompt_tokens=len(generation.prompt),
        completion_tokens=so_far + len(new),
        **more,
    )


def says(*texts: str, finish: str = "length", **more: Any) -> Callable[[Generation, Stream], None]:
    """A script: these texts, a chunk each, the last with `finish`."""

    def play(generation: Generation, stream: Stream) -> None:
        so_far = 0
        for i, text in enumerate(texts):
            last = i == len(texts) - 1
            stream.push(chunk(generation, text, so_far, finish_reason=finish if last else None, **more))
            so_far += len(text.encode())

    return play


def fails(cause: Cause, after: str = "") -> Callable[[Generation, Stream], None]:
    def play(generation: Generation, stream: Stream) -> None:
        if after:
            stream.push(chunk(generation, after))
        stream.fail(cause)

    return play


class FakeService:
    """Plays `script` on every stream at its submission; without one a test pushes to `streams` itself."""

    def __init__(self, role: str = "aggregated", dialect: str = "rooms") -> None:
        self.role = role
        self.dialect = dialect
        self.model_name = "tiny"
        self.tokenizer = ByteTokenizer()
        self.context_len = 512
        self.vocab_size = 257
        self.max_prompt_tokens = 256
        self.key_page_size = 0
        self.default_bootstrap_port: int | None = 8998
        self.script: Callable[[Generation, Stream], None] | None = None
        self.refusal: Cause | None = None
        self.batch: list[Generation] = []
        self.streams: list[Stream] = []
        self.closed: list[tuple[Rid, Cause]] = []
        self.abort_calls: list[tuple[str, int | None]] = []
        self.known = {"live": 1}
        self.policy = "early"
        self.shape = {"dp": 1, "tp": 1, "cp": 1, "pp": 1}
        self.load_balance_method = "follow_bootstrap_room"
        self.drained = ""
        self.quarantined = {("d1", 7): 3}  # pages by (decode instance, grant)
        self.healthy = True
        self._happened = asyncio.Event()

    async def until(self, true: Callable[[], bool], limit_s: float = 30.0) -> None:
        """Returns once `true` holds, looking after every submission and every close."""
        async with asyncio.timeout(limit_s):
            while not true():
                self._happened.clear()
                await self._happened.wait()

    def submit(self, batch: Sequence[Generation]) -> list[Stream]:
        if self.refusal is not None:
            raise Refused(self.refusal)
        self.batch = list(batch)
        self.streams = [Stream(generation.rid, self._on_close) for generation in batch]
        for generation, stream in zip(batch, self.streams, strict=True):
            if self.script is not None:
                self.script(generation, stream)
        self._happened.set()
        return self.streams

    def abort(self, rid: str, room: int | None = None, cause: Cause | None = None) -> int:
        self.abort_calls.append((rid, room))
        return self.known.get(rid, 0)

    def abort_all(self) -> int:
        return sum(self.known.values())

    def drain(self, reason: str) -> None:
        self.drained = self.drained or reason

    def release(self, instance: str, grant: int) -> int:
        return self.quarantined.pop((instance, grant), 0)

    def record(self, key: str) -> dict[str, Any] | None:
        return {"request": key, "phases": []} if key in self.known else None

    @property
    def live(self) -> int:
        return len(self.known)

    def server_info(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "disaggregation_mode": "null" if self.role == "aggregated" else self.role,
            "disaggregation_bootstrap_port": self.default_bootstrap_port,
            "served_model_name": self.model_name,
            "model_path": self.model_name,
            "tp_size": self.shape["tp"],
            "dp_size": self.shape["dp"],
            "load_balance_method": self.load_balance_method,
            "limits": {"context_len": self.context_len, "max_prompt_tokens": self.max_prompt_tokens},
            "stamp": "abc",
            "shape": self.shape,
            "figures": {"jobs": len(self.known), "pages": {"free": 3}},
        }

    def metrics_text(self) -> str:
        return "# TYPE pdplane_pages gauge\npdplane_pages 3\n"

    def health(self) -> tuple[bool, dict[str, Any]]:
        return self.healthy, {"live": True, "ready": self.healthy, "progressing": True}

    def _on_close(self, rid: Rid, cause: Cause) -> None:
        self.closed.append((rid, cause))
        self._happened.set()
