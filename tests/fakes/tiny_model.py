"""A tiny Llama with a byte-level tokenizer, written in transformers' format in half a second."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from model_worker.models.transformers_adapter import silence

EOS = "<|end|>"
START = "<|start|>"
MAX_POSITIONS = 512
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('there is no role ' + message['role']) }}{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_tiny_model(
    folder: Path, *, seed: int = 0, num_layers: int = 2, rope_theta: float = 10_000.0, has_template: bool = True
) -> Path:
    """Write model and tokenizer into ``folder``, equal for equal arguments; return the folder."""
    silence()
    tokenizer = make_tokenizer(has_template=has_template)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        initializer_range=0.2,
        eos_token_id=tokenizer.convert_tokens_to_ids(EOS),
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(*, has_template: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: every text has tokens, most characters beyond ASCII have several."""
    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("an", "d")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    if has_template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer
