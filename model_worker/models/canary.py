"""The canary: a fixed prompt, three blocks where the model has the positions, run canonically and digested to the bit.

Two workers whose canaries agree compute alike and may share blocks in strict mode.
"""

import hashlib

import torch
from torch import Tensor

from model_worker.models.loading import LoadedModel
from model_worker.models.trial import Trial, walk_tokens

CANARY_BLOCKS = 3


def canary_digest(model: LoadedModel) -> str:
    """Hex digest of the canary's KV and its last logits."""
    trial = Trial(model.causal, model.layout)
    num_tokens = min(CANARY_BLOCKS * model.layout.block_size, model.max_positions)
    kv = trial.new_kv(num_tokens)
    logits = trial.prefill_blocks(kv, walk_tokens(num_tokens, model.vocab_size))
    return tensors_digest([kv, logits])


def tensors_digest(tensors: list[Tensor]) -> str:
    """Hex SHA-256 over the tensors' raw bytes."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
