import pytest
from redis.crc import key_slot

from prefixcache.storage.remote_keys import EPOCH_LIFE_S, NUM_CLUSTER_GROUPS, Epochs, KeySpace
from tests.storage.tier_contract import OTHER_ROOT, ROOT, chain


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def epochs(clock: Clock) -> Epochs:
    return Epochs(clock=clock)


def test_keys_of_other_roots_words_and_blocks_differ() -> None:
    space = KeySpace("mine")
    first, second = chain(2)
    keys = {
        space.block_key(root, word, name)
        for root in (ROOT, OTHER_ROOT)
        for word in (b"a", b"b")
        for name in (first, second)
    }
    assert len(keys | {space.epoch_key(ROOT, 0), space.epoch_key(OTHER_ROOT, 0)}) == 10
    assert all(key.startswith(b"mine:{") for key in keys)


def test_a_block_lies_where_its_word_is() -> None:
    space = KeySpace("mine", NUM_CLUSTER_GROUPS)
    for name in chain(50):
        epoch_key = space.epoch_key(ROOT, space.group_of(name))
        assert key_slot(space.block_key(ROOT, b"word", name)) == key_slot(epoch_key)


def test_blocks_of_a_chain_spread_over_the_slots() -> None:
    space = KeySpace("mine", NUM_CLUSTER_GROUPS)
    slots = {key_slot(space.block_key(ROOT, b"word", name)) * 3 // 16_384 for name in chain(60)}
    assert slots == {0, 1, 2}


def test_a_word_is_known_for_a_second(epochs: Epochs, clock: Clock) -> None:
    epochs.learn(ROOT, {3: b"word"}, asked_at=clock())
    clock.now_s += EPOCH_LIFE_S * 0.99
    assert epochs.known(ROOT, 3) == b"word"
    clock.now_s += EPOCH_LIFE_S * 0.02
    assert epochs.known(ROOT, 3) is None


def test_what_was_asked_before_a_clear_is_not_learned(epochs: Epochs, clock: Clock) -> None:
    asked_at = clock()
    clock.now_s += 0.1
    epochs.learn(ROOT, {0: b"old"}, asked_at=clock())
    epochs.forget_all()
    epochs.learn(ROOT, {0: b"old"}, asked_at=asked_at)
    assert epochs.known(ROOT, 0) is None
    clock.now_s += 0.1
    epochs.learn(ROOT, {0: b"new"}, asked_at=clock())
    assert epochs.known(ROOT, 0) == b"new"
