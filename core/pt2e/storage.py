"""Where a converted graph keeps its constants: integers, halves, scales and zero points.

Before: float constants behind quantize nodes. After: buffers of the stored dtype under names that say
which constant they were. Equal content is kept once, so tied weights stay tied. What lay in a mapped file, as the
weights of a checkpoint do, has its integers in one too, and its pages are let go.
"""

from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import ConvertError
from quantplug.core.files.scratch import in_scratch
from quantplug.core.graph.editing import register
from quantplug.core.peers.linux import let_go
from quantplug.core.pt2e.quantization import Quantization
from quantplug.core.specs.stored_dtypes import overflows


class Storage:
    """Registers tensors as buffers of a graph module's root, each once."""

    def __init__(self, model: fx.GraphModule) -> None:
        self._model = model
        self._paths: dict[Any, str] = {}
        # Keys go by identity; holding on to the tensors keeps the identities unique.
        self._held: list[Tensor] = []

    def keep(self, tensor: Tensor, name: str) -> str:
        """Registers a tensor under a free name like the one given; returns the path of the buffer."""
        return self._once(("as is", id(tensor)), tensor, tensor, name)

    def keep_quantized(self, value: Tensor, quantization: Quantization, name: str) -> str:
        """Registers the integers of a constant; returns the path of the buffer."""
        scale, zero_point = quantization.scale, quantization.zero_point
        key = ("quantized", id(value), _content(scale), _content(zero_point), quantization.tail)
        if key in self._paths:
            return self._paths[key]
        return self._once(key, value, quantization.quantize(value), f"{name}_quantized")

    def keep_cast(self, value: Tensor, dtype: torch.dtype, name: str) -> str:
        """Registers a constant in half precision; returns the path of the buffer.

        Raises:
            ConvertError: a number is beyond the type's range.
        """
        key = ("cast", id(value), dtype)
        if key in self._paths:
            return self._paths[key]
        stored = value.detach().to(dtype)
        if overflows(value, stored):
            raise ConvertError(
                f"The constant '{name}' has {value.detach().abs().max():.6g}, beyond what {dtype} holds "
                f"({torch.finfo(dtype).max:.6g}); leave its operator float by a scope."
            )
        return self._once(key, value, stored, f"{name}_{str(dtype).removeprefix('torch.')}")

    def keep_made(self, value: Tensor, stored: Tensor, name: str) -> str:
        """Registers integers that were made of a constant by other means; returns the path of the buffer."""
        return register(self._model, name, _beside(value, stored.detach()))

    def _once(self, key: Any, source: Tensor, stored: Tensor, name: str) -> str:
        if key not in self._paths:
            self._paths[key] = register(self._model, name, _beside(source, stored.detach()))
            self._held.append(source)
        return self._paths[key]


def _beside(source: Tensor, stored: Tensor) -> Tensor:
    """Returns what is stored of a constant, in a file if the constant is in one."""
    return in_scratch(stored) if let_go(source) and stored.data_ptr() != source.data_ptr() else stored


def _content(number: float | Tensor) -> Any:
    return number.detach().cpu().numpy().tobytes() if isinstance(number, Tensor) else number
