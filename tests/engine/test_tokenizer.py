from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdplane.engine.errors import ModelError
from pdplane.engine.tokenizer import FolderTokenizer

from .tiny import EOS, VOCAB, write_tokenizer

TEXT = "Grüße, 東京 🙂\t2024\n"


@pytest.fixture
def tokenizer(tiny: Path) -> FolderTokenizer:
    return FolderTokenizer(tiny)


def test_text_survives_the_round_trip(tokenizer: FolderTokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.vocab_size == VOCAB


def test_a_stream_gives_characters_when_they_are_whole(tokenizer: FolderTokenizer) -> None:
    ids = tokenizer.encode("a🙂b")
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids] == ["a", "", "", "", "🙂", "b"]
    assert stream.flush() == ""


def test_a_stream_that_ends_inside_a_character_flushes_a_replacement(tokenizer: FolderTokenizer) -> None:
    stream = tokenizer.stream()
    assert [stream.push(token) for token in tokenizer.encode("🙂")[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_bytes_that_are_no_text_are_replaced(tokenizer: FolderTokenizer) -> None:
    (token,) = (number for number in range(256) if tokenizer.token_bytes(number) == b"\xff")
    assert tokenizer.decode([token, *tokenizer.encode("ok")]) == "\ufffdok"
    assert tokenizer.token_text(token) == "\ufffd"


def test_special_tokens_are_hidden_from_text_but_have_a_text_of_their_own(tokenizer: FolderTokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("hi"), EOS]) == "hi"
    assert tokenizer.decode([EOS], skip_special=False) == "<|im_end|>"
    assert tokenizer.token_text(EOS) == "<|im_end|>"
    assert tokenizer.token_bytes(EOS) == b"<|im_end|>"


@pytest.mark.parametrize("token", [VOCAB, 10**6, -1])
def test_ids_that_the_tokenizer_lacks_are_no_text(tokenizer: FolderTokenizer, token: int) -> None:
    assert tokenizer.token_bytes(token) == b""
    assert tokenizer.decode([token]) == ""


def test_a_chat_is_rendered_with_blocks_trimmed(tokenizer: FolderTokenizer) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant"
    closed = tokenizer.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert tokenizer.decode(closed, skip_special=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "tool", "content": "x"}, "no tools here"),
        ({"role": "user", "content": None}, "refuses these messages"),
        ({"role": "user"}, "refuses these messages"),
    ],
)
def test_what_the_template_refuses_is_a_value_error(
    tokenizer: FolderTokenizer, message: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        tokenizer.chat([message])


def test_a_template_cannot_reach_into_python(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="unsafe"):
        FolderTokenizer(tmp_path).chat([])


def test_a_template_file_goes_before_the_one_in_the_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ messages | tojson }}")
    tokenizer = FolderTokenizer(tmp_path)
    ids = tokenizer.chat([{"role": "user", "content": "é"}])
    assert tokenizer.decode(ids, skip_special=False) == '<|im_end|>[{"role": "user", "content": "é"}]'


def test_a_model_without_a_template_says_what_to_use_instead(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no chat template; use /v1/completions"):
        FolderTokenizer(tmp_path).chat([])


def test_a_named_template_list_gives_its_default(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = FolderTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.chat([])) == "yes"


def test_a_word_marking_vocabulary_drops_the_first_space(tmp_path: Path) -> None:
    import tokenizers

    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    tokenizer = FolderTokenizer(tmp_path)
    assert tokenizer.decode([1, 2, 3, 4, 5]) == "Hello world€"


@pytest.mark.parametrize(("content", "said"), [(None, "is missing"), ("{", "cannot read")])
def test_a_missing_or_broken_tokenizer_file_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=rf"(?s)tokenizer\.json.*{said}|{said}.*tokenizer\.json"):
        FolderTokenizer(tmp_path)
