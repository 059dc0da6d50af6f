"""What is sent: shared prefixes, chats and prompts of their own, with all that a request may ask for. Pure; seeded."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from prefixcache.client.options import GenerateOptions
from prefixcache.load.conversation import Conversation, Prompt, Request, single
from prefixcache.load.synthetic import ChatShape, SharedPrefix, chat_load, shared_prefix_load
from prefixcache.load.token_source import TokenSource

SHAPES: Final = (SharedPrefix(256, 16, num_groups=3), SharedPrefix(96, 40, num_groups=8))
CHATS: Final = ChatShape(prefix_tokens=128, turn_tokens=40, num_turns=3, num_groups=4)
WEIGHTS: Final = (3, 3, 2, 4)
PROMPT_TOKENS: Final = (8, 384)
NEW_TOKENS: Final = (4, 40)
LONGEST_TOKENS: Final = 512
"""No request of the load has more, its answer and the words of a chat template with it."""
WORDS: Final = (
    "the",
    "river",
    "runs",
    "to",
    "a",
    "wide",
    "sea",
    "where",
    "old",
    "ships",
    "wait",
    "for",
    "wind",
    "and",
    "birds",
)

SHARE_THAT_LEAVES_AT_A_TOKEN: Final = 0.10
SHARE_THAT_LEAVES_AT_A_TIME: Final = 0.06
SHARE_WITH_A_DEADLINE: Final = 0.06
SHARE_WITH_A_PRIORITY: Final = 0.20
SHARE_WITH_TWO_SAMPLES: Final = 0.06
SHARE_THAT_DRAWS: Final = 0.10
SHARE_THAT_BYPASSES: Final = 0.05
LEAVES_WITHIN_S: Final = (0.0, 3.0)
DEADLINES_S: Final = (0.1, 4.0)
PRIORITIES: Final = (-10, -1, 1, 10)


@dataclass(frozen=True, slots=True)
class SoakRequest(Request):
    """A request, all its options, and when its client goes away: after some tokens, some seconds, or not at all."""

    options: GenerateOptions = field(default_factory=GenerateOptions)
    leaves_after_tokens: int | None = None
    leaves_after_s: float | None = None

    @property
    def num_samples(self) -> int:
        """Answers asked for."""
        return self.options.get("n", 1)

    @property
    def has_deadline(self) -> bool:
        """Whether it may be told that its time is over."""
        return "timeout" in self.options

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens depend on the prompt alone."""
        return self.options.get("temperature", 0.0) == 0.0


def soak_load(source: TokenSource, *, seed: int) -> Iterator[Conversation]:
    """Conversations without end, mixed at random; the number of one and ``seed`` decide all of it but the answers."""
    rng = random.Random(f"{seed}: mix")
    kinds: Sequence[Iterator[Conversation]] = (
        *(shared_prefix_load(shape, source, max_new_tokens=1) for shape in SHAPES),
        chat_load(CHATS, source, max_new_tokens=1),
        _prompts_of_their_own(source, random.Random(f"{seed}: prompts")),
    )
    for number in itertools.count():
        (kind,) = rng.choices(kinds, WEIGHTS)
        yield _varied(next(kind), random.Random(f"{seed}: conversation {number}"))


def _varied(conversation: Conversation, rng: random.Random) -> Conversation:
    """The same prompts with options and ends of their own."""
    request = next(conversation)
    while True:
        answer = yield _vary(request, rng)
        try:
            request = conversation.send(answer)
        except StopIteration:
            return


def _vary(request: Request, rng: random.Random) -> SoakRequest:
    num_new = _log_uniform(NEW_TOKENS, rng)
    leaves_at_token, leaves_at_time = (
        rng.random() < share for share in (SHARE_THAT_LEAVES_AT_A_TOKEN, SHARE_THAT_LEAVES_AT_A_TIME)
    )
    return SoakRequest(
        request.prompt,
        num_new,
        options=_options(rng, num_new=num_new),
        leaves_after_tokens=rng.randrange(1, num_new) if leaves_at_token else None,
        leaves_after_s=rng.uniform(*LEAVES_WITHIN_S) if leaves_at_time else None,
    )


def _options(rng: random.Random, *, num_new: int) -> GenerateOptions:
    options = GenerateOptions(max_new_tokens=num_new, ignore_eos=True)
    if rng.random() < SHARE_WITH_A_DEADLINE:
        options["timeout"] = rng.uniform(*DEADLINES_S)
    if rng.random() < SHARE_WITH_A_PRIORITY:
        options["priority"] = rng.choice(PRIORITIES)
    if rng.random() < SHARE_THAT_BYPASSES:
        options["bypass_prefix_cache"] = True
    has_two_samples = rng.random() < SHARE_WITH_TWO_SAMPLES
    if has_two_samples:
        options["n"] = 2
    if has_two_samples or rng.random() < SHARE_THAT_DRAWS:
        options |= {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(2**31)}
    return options


def _prompts_of_their_own(source: TokenSource, rng: random.Random) -> Iterator[Conversation]:
    """Prompts of mixed lengths that share nothing, as token ids, text and chat messages in turn."""
    for number in itertools.count():
        num_tokens = _log_uniform(PROMPT_TOKENS, rng)
        text = " ".join([str(number), *rng.choices(WORDS, k=num_tokens)])
        forms: tuple[Prompt, ...] = (
            source.run(f"prompt {number}", num_tokens),
            text,
            ({"role": "user", "content": text},),
        )
        yield single(Request(forms[number % len(forms)], 1))


def _log_uniform(bounds: tuple[int, int], rng: random.Random) -> int:
    low, high = bounds
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
