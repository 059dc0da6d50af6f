"""Stop texts across token boundaries: nothing of a stop text is sent, nothing else is kept back for good."""

from hypothesis import given
from hypothesis import strategies as st

from model_worker.engine.output import OutputText


class Pieces:
    """A decoder whose tokens are texts by number."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def step(self, token_id: int) -> str:
        return self._pieces[token_id]


def push_all(pieces: list[str], stops: list[str]) -> tuple[list[str], OutputText]:
    output = OutputText(Pieces(pieces), stops)
    return [output.push(place) for place in range(len(pieces))], output


def oracle(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """The whole text cut before the first stop text of the earliest token at which one is complete."""
    text = ""
    for piece in pieces:
        text += piece
        found = min(((text.find(stop), stop) for stop in stops if stop in text), default=None)
        if found is not None:
            return text[: found[0]], found[1]
    return text, None


def test_without_stop_texts_everything_is_sent_at_once() -> None:
    assert push_all(["a", "", "bc"], [])[0] == ["a", "", "bc"]


def test_a_stop_text_over_several_tokens_is_found_and_not_sent() -> None:
    sent, output = push_all(["Hello", " E", "N", "D of it"], ["END"])
    assert sent == ["Hello", " ", "", ""]
    assert output.matched_stop == "END"
    assert output.flush() == ""


def test_what_only_looked_like_a_stop_text_is_sent_as_soon_as_it_cannot_be_one() -> None:
    sent, output = push_all(["E", "N", "X"], ["END"])
    assert sent == ["", "", "ENX"]
    assert output.matched_stop is None


def test_a_beginning_inside_a_failed_beginning_is_still_seen() -> None:
    sent, output = push_all(list("aabaab aabaac"), ["aabaac"])
    assert "".join(sent) == "aabaab "
    assert output.matched_stop == "aabaac"


def test_the_stop_text_that_begins_first_wins() -> None:
    sent, output = push_all(["xx abc"], ["c", "bc", "zzz"])
    assert sent == ["xx a"]
    assert output.matched_stop == "bc"


def test_of_two_stop_texts_at_one_place_the_shorter_wins() -> None:
    assert push_all(["<end>"], ["<end>", "<end"])[1].matched_stop == "<end"


def test_flush_gives_what_was_held_back_once() -> None:
    sent, output = push_all(["ok E"], ["END"])
    assert sent == ["ok "]
    assert output.flush() == "E"
    assert output.flush() == ""


def test_after_a_stop_nothing_more_comes() -> None:
    assert push_all(["STOP", "more"], ["STOP"])[0] == ["", ""]


letters = st.text(alphabet="ab é", max_size=4)


@given(pieces=st.lists(letters, max_size=12), stops=st.lists(letters.filter(bool), max_size=3))
def test_output_agrees_with_searching_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    sent, output = push_all(pieces, stops)
    text, matched = oracle(pieces, stops)
    assert output.matched_stop == matched
    assert "".join(sent) + output.flush() == text


@given(pieces=st.lists(letters, max_size=12), stops=st.lists(letters.filter(bool), min_size=1, max_size=3))
def test_only_a_possible_beginning_of_a_stop_text_is_held_back(pieces: list[str], stops: list[str]) -> None:
    sent, output = push_all(pieces, stops)
    if output.matched_stop is None:
        held = output.flush()
        assert "".join(sent) + held == "".join(pieces)
        assert not held or any(stop.startswith(held) for stop in stops)
