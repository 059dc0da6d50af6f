"""A worker process through its gRPC door with the SDK: answers, usage, endings, and nothing left behind."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixcache import Client
from prefixcache.client import Generation
from prefixcache.errors import DeadlineExceeded
from tests.e2e.lab import DEMO_MODEL, Lab, chosen_prompts
from tests.e2e.processes import check_comes_to_rest, worker_process
from tests.prompts import system_prompt

BLOCK_SIZE = 64
NUM_TOKENS = 12
DEADLINE_S = 1.0
SLACK_S = 2.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("worker") / "log.txt"
    with worker_process(DEMO_MODEL, "--log-level", "warning", log=log) as (_, address):
        yield address
    assert log.read_text() == ""


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    """A client of a worker whose cache is empty; nothing may be left running or held."""
    with Client(address) as client:
        client.clear()
        yield client
        check_comes_to_rest(client)


def ask(client: Client, prompt: str) -> Generation:
    return client.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True)


def test_hit_gives_the_cold_answer_and_both_say_what_was_reused(client: Client) -> None:
    prompt = chosen_prompts()[2].text
    num_tokens = len(client.tokenize(prompt).token_ids)
    num_whole = num_tokens // BLOCK_SIZE * BLOCK_SIZE
    cold, hit = ask(client, prompt), ask(client, prompt)
    assert (hit.text, hit.token_ids) == (cold.text, cold.token_ids)
    assert cold.usage.prompt_tokens == hit.usage.prompt_tokens == num_tokens
    assert cold.usage.completion_tokens == len(cold.token_ids) == NUM_TOKENS
    assert (cold.usage.cached_prompt_tokens, cold.usage.cache_creation_tokens) == (0, num_whole)
    assert (hit.usage.cached_prompt_tokens, hit.usage.cache_creation_tokens) == (num_whole, 0)
    assert hit.timings.prefill_s < cold.timings.prefill_s
    assert client.lookup(prompt).cached_prompt_tokens == num_whole
    assert client.lookup(prompt, cache_salt="another").cached_prompt_tokens == 0


@pytest.mark.asyncio(loop_scope="session")
async def test_another_worker_of_the_profile_gives_the_same_tokens(bf16: Lab, client: Client) -> None:
    prompt = chosen_prompts()[3].text
    info = await asyncio.to_thread(client.model_info)
    theirs = await asyncio.to_thread(ask, client, prompt)
    ours = await bf16.answer(bf16.encode(prompt), num_tokens=NUM_TOKENS)
    assert info.namespace_digest == bf16.engine.description.namespace_digest
    assert list(theirs.token_ids) == ours.token_ids
    assert theirs.text == ours.text


def test_pieces_of_a_stream_are_the_whole_answer(client: Client) -> None:
    prompt = chosen_prompts()[2].text
    whole = ask(client, prompt)
    with client.stream(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True) as stream:
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == stream.result.text == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids


def test_stop_text_ends_the_answer_before_itself(client: Client) -> None:
    prompt = chosen_prompts()[2].text
    whole = ask(client, prompt).text
    stop = whole[len(whole) // 2 :][:5]
    answer = client.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True, stop=[stop, "never said"])
    assert answer.text == whole[: whole.index(stop)]
    assert (answer.finish_reason, answer.matched_stop) == ("stop_text", stop)


def test_seed_decides_what_is_drawn(client: Client) -> None:
    def draw(seed: int) -> tuple[int, ...]:
        return client.generate("Once upon a time", max_new_tokens=NUM_TOKENS, temperature=1.0, seed=seed).token_ids

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(1, 4)}) > 1


def test_two_clients_at_once_get_their_own_answers(address: str, client: Client) -> None:
    prompts = [prompt.text for prompt in chosen_prompts()[2:6]]
    alone = [ask(client, prompt) for prompt in prompts]
    client.clear()
    with Client(address) as other, ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(ask, [client, other, client, other], prompts))
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


def test_closed_stream_leaves_nothing_behind(client: Client) -> None:
    before = client.stats().requests
    stream = client.stream("Count to a million:", max_new_tokens=2_000, ignore_eos=True)
    next(stream)
    assert client.stats().engine.num_running == 1
    stream.close()
    check_comes_to_rest(client, within_s=SLACK_S)
    after = client.stats().requests
    assert (after.cancelled, after.finished) == (before.cancelled + 1, before.finished)


def test_deadline_in_the_middle_of_prefill_ends_the_request(client: Client) -> None:
    prompt = system_prompt() * 4
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.generate(prompt, max_new_tokens=1, timeout=DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S + SLACK_S
    check_comes_to_rest(client, within_s=SLACK_S)
    found = client.lookup(prompt)
    assert 0 < found.cached_blocks < found.num_blocks, "the deadline did not come in the middle of prefill"
    assert ask(client, "Still there?").usage.completion_tokens == NUM_TOKENS
