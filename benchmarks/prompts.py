"""Seeded prompts of exact token counts, made of text as people write it: words, accents, CJK, emoji."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from pdplane.engine.install import default_model_path
from pdplane.engine.tokenizer import FolderTokenizer

PLAIN = (
    "the", "a", "of", "and", "to", "in", "is", "that", "was", "for", "on", "with", "as", "by", "at", "from",
    "this", "which", "their", "about", "more", "when", "people", "time", "water", "city", "river", "train",
    "letter", "morning", "garden", "history", "music", "number", "window", "road", "winter", "light", "paper",
    "kitchen", "question", "slowly", "writes", "opens", "carries", "remembers", "finds", "answers", "builds",
    "follows", "small", "old", "green", "quiet", "early", "another,", "never.", "because,", "although.",
    "perhaps", "between", "1848", "27", "3.14", "however;", "house:", "table",
)  # fmt: skip
WORLD = (
    "café", "naïve", "Übergröße", "señor", "déjà vu", "façade", "smörgåsbord", "Łódź", "čeština", "Ελλάδα",
    "Москва", "שלום", "مرحبا", "नमस्ते", "東京タワー", "北京大学", "한국어", "漢字かな", "🙂", "🚀🌍",
    "👩\u200d👩\u200d👧", "🇫🇷", "✓", "€42", "½", "—", "“quoted”", "ﬁ", "e\u0301", "𝒳",
)  # fmt: skip
FILLER = (" the", " a", " of", " and", " in")  # one token each


def tokenizer() -> FolderTokenizer:
    """The embedded model's. RuntimeError where it is not installed."""
    folder = default_model_path()
    if folder is None:
        raise RuntimeError("the embedded model is not installed; run 'pdplane model install'")
    return FolderTokenizer(folder)


def log_uniform(count: int, low: int, high: int, rng: random.Random) -> list[int]:
    """`count` lengths, one drawn in each of `count` equal strata of log(length), both ends included, in random
    order."""
    span = math.log(high / low)
    lengths = [round(low * math.exp(span * (stratum + rng.random()) / count)) for stratum in range(count)]
    lengths[0], lengths[-1] = low, high
    rng.shuffle(lengths)
    return lengths


class Writer:
    """Makes texts. `plain`: words of one script only, so that every token is text by itself."""

    def __init__(self, tokenizer: FolderTokenizer, rng: random.Random, *, plain: bool = False) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._words = PLAIN if plain else PLAIN + WORLD
        self._sizes: dict[str, int] = {}

    def text(self, tokens: int) -> str:
        """A text that the tokenizer turns into exactly `tokens` tokens."""
        for _ in range(100):
            text = self._attempt(tokens)
            if len(self._tokenizer.encode(text)) == tokens:
                return text
        raise RuntimeError(f"found no text of exactly {tokens} tokens")

    def ids(self, tokens: int) -> list[int]:
        """The ids of a text, cut wherever the count is reached, also within a character."""
        return self._tokenizer.encode(self._attempt(tokens + 16))[:tokens]

    def _attempt(self, tokens: int) -> str:
        """About right: sizes of words add up unless the tokenizer merges across them."""
        parts = [self._rng.choice(("The", "A", "In", "One", "My"))]
        left = tokens - 1
        while left > 0:
            word = " " + self._rng.choice(self._words)
            if self._size(word) > left:
                word = self._rng.choice(FILLER)
            parts.append(word)
            left -= self._size(word)
        return "".join(parts)

    def _size(self, word: str) -> int:
        if word not in self._sizes:
            self._sizes[word] = len(self._tokenizer.encode(word))
        return self._sizes[word]


def shares(count: int, weights: Sequence[tuple[str, int]], rng: random.Random) -> list[str]:
    """`count` names in proportion to their weights, in random order."""
    cycle = [name for name, weight in weights for _ in range(weight)]
    names = [cycle[i % len(cycle)] for i in range(count)]
    rng.shuffle(names)
    return names
