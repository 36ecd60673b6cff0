import pytest

from pdplane.worker.text import Spelling, TextOptions, first_stop, spell

from .http_fakes import EOS, ByteTokenizer


def spelling(*stop: str, min_tokens: int = 0, **more: bool) -> Spelling:
    return Spelling(ByteTokenizer(), TextOptions(stop=stop, **more), min_tokens)


def pushed(spelled: Spelling, text: str) -> list[str]:
    return [spelled.push(byte) for byte in text.encode()]


def test_text_without_stop_strings_passes_token_by_token() -> None:
    assert pushed(spelling(), "abc") == ["a", "b", "c"]


def test_a_character_of_several_tokens_appears_when_it_is_whole() -> None:
    assert pushed(spelling(), "é!") == ["", "é", "!"]


def test_a_stop_string_over_several_tokens_ends_the_text_before_it() -> None:
    spelled = spelling("STOP")
    assert pushed(spelled, "go STOP") == ["g", "o", " ", "", "", "", ""]
    assert spelled.matched == "STOP"


def test_text_that_only_began_like_a_stop_string_is_given_back() -> None:
    assert pushed(spelling("STOP"), "STO!") == ["", "", "", "STO!"]


def test_what_was_held_back_comes_at_the_end() -> None:
    spelled = spelling("STOP")
    pushed(spelled, "xST")
    assert spelled.end() == "ST"


def test_a_repeated_beginning_is_held_back_from_its_latest_possible_start() -> None:
    spelled = spelling("aab")
    assert pushed(spelled, "aaab") == ["", "", "a", ""]
    assert spelled.matched == "aab"


def test_the_stop_string_is_shown_where_it_is_asked_for() -> None:
    assert "".join(pushed(spelling("b", include_stop_str=True), "ab")) == "ab"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_stop_string_that_is_complete_first_wins_however_the_text_is_cut(cut: int) -> None:
    class Chunky(ByteTokenizer):
        def stream(self, *, skip_special: bool = True):  # type: ignore[no-untyped-def]
            class Texts:
                def push(self, token: int) -> str:
                    return "xabc"[token : token + cut]

                def flush(self) -> str:
                    return ""

            return Texts()

    spelled = Spelling(Chunky(), TextOptions(stop=("abc", "b")))
    text = ""
    for start in range(0, 4, cut):
        text += spelled.push(start)
        if spelled.matched:
            break
    assert (text, spelled.matched) == ("xa", "b")


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert first_stop("xabc", ["bc", "abc", "c"]) == (1, "abc")


def test_a_stop_string_before_min_tokens_ends_nothing() -> None:
    spelled = spelling("b", min_tokens=3)
    assert "".join(pushed(spelled, "ab")) == "ab"
    assert spelled.matched is None
    pushed(spelled, "b")
    assert spelled.matched == "b"


def test_a_stop_token_is_not_shown() -> None:
    spelled = spelling()
    pushed(spelled, "a")
    assert spelled.end(last=ord("z")) == ""


def test_a_stop_token_is_shown_where_the_stop_is_to_be_included() -> None:
    assert spelling(include_stop_str=True).end(last=ord("z")) == "z"


def test_a_stop_string_that_only_the_end_completes_is_a_stop() -> None:
    begun = list("é".encode()[:1])
    spelled = spell(ByteTokenizer(), TextOptions(stop=("\ufffd",)), begun, "length")
    assert (spelled.text, spelled.finish, spelled.matched_stop) == ("", "stop", "\ufffd")


def test_special_tokens_are_shown_on_request() -> None:
    assert spelling().push(EOS) == ""
    assert spelling(skip_special_tokens=False).push(EOS) == "<end>"


def test_a_broken_character_at_the_end_is_still_told() -> None:
    spelled = spelling()
    assert spelled.push(0xC3) == ""
    assert spelled.end() == "\ufffd"


@pytest.mark.parametrize(
    ("text", "ended", "stop", "expected"),
    [
        ("a", "length", (), ("a", "length", None)),
        ("a", "stop", (), ("", "stop", ord("a"))),
        ("a", "length", ("a",), ("", "stop", "a")),
        ("a", None, ("ab",), ("", None, None)),
        ("a", "length", ("ab",), ("a", "length", None)),
    ],
)
def test_a_sample_known_as_a_whole_is_spelled_like_one_that_grows(
    text: str, ended: str | None, stop: tuple[str, ...], expected: tuple[str, str | None, str | int | None]
) -> None:
    spelled = spell(ByteTokenizer(), TextOptions(stop=stop), list(text.encode()), ended)
    assert (spelled.text, spelled.finish, spelled.matched_stop) == expected
