"""The canary: a fixed three-block prompt, run canonically, digested to the bit.

Two workers whose canaries agree compute alike and may share blocks in strict mode.
"""

import torch

from model_worker.models.attention import AttentionBatch, Span
from model_worker.models.loading import LoadedModel
from model_worker.models.qualification import CANARY_BLOCKS, canary_tokens, tensors_digest


@torch.inference_mode()
def canary_digest(model: LoadedModel) -> str:
    """Hex digest of the canary's KV and last logits."""
    layout = model.layout
    size = layout.block_size
    num_tokens = CANARY_BLOCKS * size
    shape = (layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
    kv = torch.zeros(shape, dtype=layout.working_dtype, device=model.device)
    mask = torch.full((size, size), float("-inf"), dtype=layout.working_dtype, device=model.device).triu(1)
    ids = torch.tensor([canary_tokens(num_tokens, model.vocab_size)], device=model.device)
    logits = torch.empty(0)
    for start in range(0, num_tokens, size):
        positions = torch.arange(start, start + size, device=model.device).unsqueeze(0)
        batch = AttentionBatch((Span(kv.flatten(1, 2), start, 0, size),), mask, layout.storage_dtype)
        logits = model.causal.forward_logits(ids[:, start : start + size], positions, batch, num_logits=1)
    return tensors_digest([kv, logits])
