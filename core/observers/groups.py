"""Fake quantizes of weights whose blocks have a scale each, such as groups of input channels.

Before: a spec with one of torchao's observers of blocks in training, or with a constructor from here. After: a fake
quantize that computes what convert puts in its place, `quantize_affine` and `dequantize_affine`.

`GroupFakeQuantize` takes each block's scale from the weight of the moment, `GroupLearnedStepFakeQuantize` trains it.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import AffineQuantizedObserverBase, FakeQuantizeBase, MappingType, PerGroup

from quantplug.core.errors import ConfigError
from quantplug.core.observers.learned_step import LearnedStepSizeFakeQuantize
from quantplug.core.observers.straight_through import straight_through

_AFFINE = torch.ops.torchao


class GroupFakeQuantize(FakeQuantizeBase):
    """Quantizes and dequantizes a weight by the ranges of its blocks at that moment; gradients pass as they are.

    Gradients pass at the ends of the range too: the extreme of a symmetric block is rounded to 7 where it is 7.5
    scales, and a weight that got no gradient there would stay its block's extreme for ever. There is nothing to
    freeze: `disable_observer` leaves it as it is, as with ranges of run time.

    Args:
        observer: makes torchao's observer of blocks, which finds the numbers.
        options: for the observer, such as `granularity`, `quant_min` and `quant_max`.
    """

    of_the_moment = True

    def __init__(self, observer: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self._unseen: Any = observer(**options)
        self.activation_post_process: Any = self._unseen
        self.dtype, self.is_dynamic = self._unseen.target_dtype, False
        self.quant_min, self.quant_max = self._unseen.quant_min, self._unseen.quant_max

    def forward(self, x: Tensor) -> Tensor:
        """Returns x as its integers stand for it, or x itself while fake quantization is disabled."""
        self.activation_post_process = copy.deepcopy(self._unseen)
        with torch.no_grad():
            self.activation_post_process(x)
            if self.fake_quant_enabled[0] == 0 or not x.numel():
                return x
            rounded = self._rounded(x)
        return straight_through(x, rounded)

    def _rounded(self, x: Tensor) -> Tensor:
        numbers = (self.activation_post_process.block_size, *self.calculate_qparams())
        tail = (*numbers, self.dtype, self.quant_min, self.quant_max)
        integers = _AFFINE.quantize_affine(x, *tail)
        found: Tensor = _AFFINE.dequantize_affine(integers, *tail, output_dtype=x.dtype)
        return found

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Returns scale and zero point of each block of the weight that was seen last."""
        found: tuple[Tensor, Tensor] = self.activation_post_process.calculate_qparams()
        return found

    def convert(self, model: fx.GraphModule, observer_node: fx.Node) -> None:
        """Puts the nodes in the place of a call of this fake quantize."""
        self.activation_post_process.convert(model, observer_node)


class GroupLearnedStepFakeQuantize(LearnedStepSizeFakeQuantize):
    """Learns a step size for each group along the last dimension: a group is a channel of the weight in rows.

    Args:
        granularity: torchao's `PerGroup(size)`.
        options: as for `LearnedStepSizeFakeQuantize`; the scheme is symmetric.

    Raises:
        ConfigError: another granularity, or no static integer quantization.
    """

    def __init__(self, granularity: PerGroup, **options: Any) -> None:
        if not isinstance(granularity, PerGroup):
            raise ConfigError(f"Step sizes of groups have the granularity {granularity}; pass PerGroup(size).")
        super().__init__(**{**options, "qscheme": torch.per_channel_symmetric, "ch_axis": 0})
        self.granularity = granularity

    def forward(self, x: Tensor) -> Tensor:
        """Returns x quantized and dequantized, or x itself while fake quantization is disabled."""
        return super().forward(x.reshape(-1, self.granularity.group_size)).reshape(x.shape)

    def convert(self, model: fx.GraphModule, observer_node: fx.Node) -> None:
        """Puts the nodes in the place of a call of this fake quantize."""
        weight = observer_node.all_input_nodes[0].meta["val"]
        size = self.granularity.group_size
        shape = (*weight.shape[:-1], weight.shape[-1] // size)
        numbers = tuple(found.reshape(shape) for found in self.calculate_qparams())
        known = _Known(MappingType.SYMMETRIC, self.dtype, self.granularity, self.quant_min, self.quant_max)
        known.block_size, known.original_dtype = (*(1 for _ in shape[:-1]), size), weight.dtype
        known.numbers = numbers
        known.convert(model, observer_node)


class _Known(AffineQuantizedObserverBase):
    """Stands for numbers that are known, so that torchao's own code writes the nodes of blocks."""

    numbers: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> tuple[Tensor, ...]:
        return self.numbers
