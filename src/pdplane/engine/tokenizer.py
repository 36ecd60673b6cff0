"""Text to token ids and back: a `tokenizer.json`, and the chat template beside it."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from .chat_template import ChatTemplate
from .config import read_json
from .errors import ModelError


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters: those that are printable as themselves, the rest from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(others)}


class FolderTokenizer:
    """Implements worker.engine.Tokenizer for a Hugging Face folder. Raises ModelError where it has no tokenizer."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            content = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except FileNotFoundError:
            raise ModelError(
                f"{path} is missing; the folder needs a tokenizers file (save the model with a fast tokenizer)"
            ) from None
        except Exception as error:  # the library raises bare Exception for what it cannot parse
            raise ModelError(f"cannot read {path}: {error}; download the model again") from error
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._chat = ChatTemplate(folder)
        decoder = read_json(path).get("decoder")
        self._byte_level = '"ByteLevel"' in str(decoder).replace("'", '"')
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {number: token.content.encode() for number, token in added.items()}
        self._special = frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(token) for token in ids]) + stream.flush()

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """b"" for ids that the tokenizer does not have (vocabularies are padded)."""
        if token in self._added:
            return self._added[token]
        piece = self._tokenizer.id_to_token(token) if token >= 0 else None
        if piece is None:
            return b""
        if self._byte_level:
            alphabet = byte_alphabet()
            return bytes(alphabet[char] for char in piece if char in alphabet)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def chat(self, messages: Sequence[dict[str, object]], *, add_generation_prompt: bool = True) -> list[int]:
        return self.encode(self._chat.render(messages, add_generation_prompt), add_special=False)

    def stream(self, *, skip_special: bool = True) -> Detokenizer:
        return Detokenizer(self, self._special if skip_special else frozenset(), strip=not self._byte_level)


class Detokenizer:
    """Implements worker.engine.TokenStream: bytes of tokens in, whole characters out; bytes that are no text become
    U+FFFD. `strip`: vocabularies that mark words with a leading space drop the very first one."""

    def __init__(self, tokenizer: FolderTokenizer, hidden: frozenset[int], *, strip: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._strip = strip
        self._decoder: Any = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        text: str = self._decoder.decode(self._tokenizer.token_bytes(token))
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        text: str = self._decoder.decode(b"", True)
        return text
