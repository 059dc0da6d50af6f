"""The canary: a fixed three-block prompt, run canonically, digested to the bit.

Two workers whose canaries agree compute alike and may share blocks in strict mode.
"""

from model_worker.models.loading import LoadedModel
from model_worker.models.qualification import CANARY_BLOCKS, canary_tokens, tensors_digest
from model_worker.models.trial import Trial


def canary_digest(model: LoadedModel) -> str:
    """Hex digest of the canary's KV and its last block's logits."""
    trial = Trial(model.causal, model.layout)
    num_tokens = CANARY_BLOCKS * model.layout.block_size
    kv = trial.new_kv(num_tokens)
    logits = trial.prefill_blocks(kv, canary_tokens(num_tokens, model.vocab_size))
    return tensors_digest([kv, logits[-model.layout.block_size :]])
