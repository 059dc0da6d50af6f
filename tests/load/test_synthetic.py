from itertools import islice

import pytest

from prefixcache.load.conversation import Answer, Conversation
from prefixcache.load.synthetic import ChatShape, SharedPrefix, chat_load, shared_prefix_load
from prefixcache.load.token_source import TokenSource

SOURCE = TokenSource(1_000, seed=0, excluded=[70, 999])


def prompts(shape: SharedPrefix, number: int, source: TokenSource = SOURCE) -> list[tuple[int, ...]]:
    load = islice(shared_prefix_load(shape, source, max_new_tokens=3), number)
    return [tuple(next(conversation).prompt) for conversation in load]  # type: ignore[arg-type]


def answer(*token_ids: int) -> Answer:
    return Answer(token_ids, "", prompt_tokens=1, cached_prompt_tokens=0)


def turns(conversation: Conversation, *answers: tuple[int, ...]) -> list[object]:
    return [next(conversation).prompt, *(conversation.send(answer(*ids)).prompt for ids in answers)]


def test_tokens_are_neither_special_nor_excluded() -> None:
    drawn = set(SOURCE.run("any", 50_000))
    assert min(drawn) == 1_000 // 16
    assert not drawn & {70, 999}


def test_a_group_shares_its_prefix_and_nothing_else() -> None:
    first, other, second = prompts(SharedPrefix(prefix_tokens=20, suffix_tokens=5, num_groups=2), 3)
    assert len(first) == len(other) == 25
    assert first[:20] == second[:20] != other[:20]
    assert first[20:] != second[20:]


def test_equal_seeds_make_equal_prompts() -> None:
    shape = SharedPrefix(prefix_tokens=8, suffix_tokens=8)
    assert prompts(shape, 5) == prompts(shape, 5, TokenSource(1_000, seed=0, excluded=[70, 999]))
    assert prompts(shape, 5) != prompts(shape, 5, TokenSource(1_000, seed=1, excluded=[70, 999]))


def test_a_request_has_the_length_asked_for() -> None:
    request = next(next(shared_prefix_load(SharedPrefix(0, 1), SOURCE, max_new_tokens=3)))
    assert (len(request.prompt), request.max_new_tokens) == (1, 3)


def test_each_turn_of_a_chat_holds_all_before_it_with_the_real_answers() -> None:
    chats = chat_load(ChatShape(prefix_tokens=10, turn_tokens=4, num_turns=3), SOURCE, max_new_tokens=2)
    first, second, third = turns(next(chats), (1, 2), (3, 4))
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert isinstance(third, tuple)
    assert len(first) == 14
    assert second[:16] == (*first, 1, 2)
    assert third[:22] == (*second, 3, 4)
    assert len(third) == 26


def test_a_chat_ends_after_its_turns() -> None:
    chat = next(chat_load(ChatShape(num_turns=1), SOURCE, max_new_tokens=2))
    next(chat)
    with pytest.raises(StopIteration):
        chat.send(answer(1))


def test_chats_of_a_group_share_the_system_prompt() -> None:
    chats = chat_load(ChatShape(prefix_tokens=10, turn_tokens=4, num_groups=2), SOURCE, max_new_tokens=2)
    first, other, second = (next(chat).prompt for chat in islice(chats, 3))
    assert first[:10] == second[:10] != other[:10]
    assert first[10:] != second[10:]
