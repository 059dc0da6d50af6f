"""Linear layers with weights packed once, at load, for the CPU's matrix kernels.

``torch.nn.Linear`` reads unpacked weights and, for bfloat16 on a CPU without
bfloat16 instructions, computes one dot product at a time. On CPU activations are
float32 whatever the model's dtype is. Three kernels, all accumulating in float32;
none changes a weight's value:

* ``onednn_bfloat16`` where the CPU multiplies bfloat16,
* ``fbgemm_float16`` where every weight is exactly a float16: half the bytes of
  float32, which is what decoding waits for,
* ``onednn_float32`` otherwise.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

PACKING_ROWS = 64


class Kernel(Protocol):
    """A packed weight, and the product with it in ``dtype``: ``[rows, in_features]`` to ``[rows, out_features]``."""

    name: str
    dtype: torch.dtype
    packed_bytes: int

    def apply(self, rows: Tensor) -> Tensor:
        """Multiply; ``rows`` is contiguous, of the layer's dtype, and so is the result."""


class OneDnnKernel:
    """oneDNN's packed product, in bfloat16 or float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._bias = None if bias is None else bias.to(dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), PACKING_ROWS)
        self.name = f"onednn_{str(dtype).removeprefix('torch.')}"
        self.packed_bytes = weight.numel() * dtype.itemsize

    def apply(self, rows: Tensor) -> Tensor:
        """Multiply in the kernel's dtype."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(self.dtype), self._packed, self._bias, "none", [], ""
        )
        return product.to(rows.dtype)


class FbgemmKernel:
    """FBGEMM's product with float16 weights, widened on the fly, in float32."""

    name = "fbgemm_float16"
    dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            weight.float().contiguous(), None if bias is None else bias.float()
        )
        self.packed_bytes = weight.numel() * torch.float16.itemsize

    def apply(self, rows: Tensor) -> Tensor:
        """Multiply in float32."""
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows.float(), self._packed)
        return product.to(rows.dtype)


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type activations have where weights and KV are of ``dtype``."""
    return torch.float32 if device.type == "cpu" else dtype


def is_exactly(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` holds every value of ``weight`` unchanged."""
    return torch.equal(weight.to(dtype).to(weight.dtype), weight)


def pick_kernel(weight: Tensor, bias: Tensor | None) -> Kernel:
    """The fastest kernel of this CPU that keeps every weight's value; decided by what is there, never by timing."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() and is_exactly(weight, torch.bfloat16):
        return OneDnnKernel(weight, bias, torch.bfloat16)
    if "fbgemm" in torch.backends.quantized.supported_engines and is_exactly(weight, torch.float16):
        return FbgemmKernel(weight, bias)
    return OneDnnKernel(weight, bias, torch.float32)


class PackedLinear(nn.Module):
    """``y = x W^T + b`` for one layer or several with the same input, stacked along the output.

    Inputs ``[..., in_features]``, outputs ``[..., out_features]``, both of the layers' dtype.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.kernel = pick_kernel(weight, _joined_bias(layers))

    def apply_rows(self, rows: Tensor) -> Tensor:
        """Apply the layer to ``[rows, in_features]``, past the module's call machinery."""
        return self.kernel.apply(rows)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layer; see the class."""
        rows = inputs.reshape(-1, self.in_features)
        return self.kernel.apply(rows).view(*inputs.shape[:-1], self.out_features)


def _joined_bias(layers: tuple[nn.Linear, ...]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return torch.cat([part.detach() for part in parts])


def is_packing_supported(device: torch.device) -> bool:
    """Whether this build of torch and this device can run packed linears."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available()


def pack_linears(model: nn.Module) -> None:
    """Replace every ``nn.Linear`` of ``model`` in place.

    The unpacked weights are released as far as nothing else (a tied embedding) uses them.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))


def packed_linears(model: nn.Module) -> list[PackedLinear]:
    """All packed layers of ``model``."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]
