"""Text to tokens and back: the model's own template, and a stream decoder.

Thread-safe: the tokenizers library keeps no state between calls; a ``StreamDecoder``
belongs to one sequence. It holds the GIL through ``encode`` and ``decode``, seconds
for a long text, and releases it in the batch calls, which are therefore used.
"""

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from model_worker.models.token_bounds import token_bound
from prefixcache.errors import InvalidRequest


class StreamDecoder:
    """Text of one growing output, never half a character (the tokenizers library's stream decoder)."""

    __slots__ = ("_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def step(self, token_id: int) -> str:
        """The text that became certain with ``token_id``; empty while a character is incomplete."""
        return self._stream.step(self._tokenizer, token_id) or ""


class PromptTokenizer:
    """Encodes prompts exactly as the model expects them.

    ``tokenizer`` is a transformers fast tokenizer. Methods raise InvalidRequest with
    the offending value for input that has no tokens or that the template refuses.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401  transformers' class; only models/ imports it
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._bound = token_bound(self._backend)
        self.has_chat_template = bool(tokenizer.chat_template)
        self.takes_tools = re.search(r"\btools\b", str(tokenizer.chat_template)) is not None

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` has at least, found without tokenizing; 0 where nothing is known."""
        return 0 if self._bound is None else self._bound.fewest_tokens(text)

    @property
    def highest_id(self) -> int:
        """The highest token id that a text or a template can have."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode_text(self, text: str) -> list[int]:
        """Tokens of plain text, with the special tokens the tokenizer adds by default."""
        return self._encode(text, add_special_tokens=True)

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of text that a chat template rendered: special tokens are in the text already."""
        return self._encode(text, add_special_tokens=False)

    def render_chat(self, messages: Sequence[dict[str, str]], tools: Sequence[dict[str, object]] = ()) -> str:
        """The conversation as the model's template writes it, ending where the assistant's answer begins.

        ``tools`` are JSON objects in the form the template expects.
        """
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; send the prompt as text or as token ids")
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {str(error) or type(error).__name__}; send what it "
                "accepts, or send text or token ids"
            ) from error
        return str(rendered)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens included."""
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=False)[0]

    def new_stream(self) -> StreamDecoder:
        """A decoder for one output."""
        return StreamDecoder(self._backend)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("the prompt is not valid Unicode; send well-formed text") from error
