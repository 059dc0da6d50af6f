"""Linear layers with weights packed for the CPU's matrix kernels.

``torch.nn.Linear`` reads unpacked weights and, for bfloat16 on a CPU without
bfloat16 instructions, computes one dot product at a time. Here the weight is
reordered once at load by oneDNN: in bfloat16 where the CPU multiplies bfloat16,
else in float32 (inputs widened, the output rounded once).
"""

import torch
from torch import Tensor, nn

PACKING_ROWS = 64


def packed_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype weights are packed in: the compute dtype where the CPU multiplies it, else float32."""
    if compute_dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


class PackedLinear(nn.Module):
    """``y = x W^T + b`` for one or several weights stacked along the output dimension.

    Computes in ``packed_dtype``; inputs and outputs are of the layer's own dtype.
    Inputs ``[..., in_features]``, outputs ``[..., out_features]``.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed_dtype = packed_dtype(weight.dtype)
        self.bias = _joined_bias(layers, self.packed_dtype)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(self.packed_dtype), PACKING_ROWS)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layer; see the class."""
        rows = inputs.reshape(-1, self.in_features).to(self.packed_dtype)
        out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out.to(self.dtype).view(*inputs.shape[:-1], self.out_features)

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed weight."""
        return self.out_features * self.in_features * self.packed_dtype.itemsize


def _joined_bias(layers: tuple[nn.Linear, ...], dtype: torch.dtype) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts = [
        torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float() for layer in layers
    ]
    return torch.cat(parts).to(dtype)


def is_packing_supported(device: torch.device) -> bool:
    """Whether this build of torch and this device can run packed linears."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available()


def pack_linears(model: nn.Module) -> int:
    """Replace every ``nn.Linear`` of ``model`` in place; returns the bytes of packed weights.

    The unpacked weights are released as far as nothing else (a tied embedding) uses them.
    """
    packed_bytes = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                layer = PackedLinear(child)
                setattr(parent, name, layer)
                packed_bytes += layer.packed_bytes
    return packed_bytes
