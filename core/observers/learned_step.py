"""Learned step size quantization: a fake quantize whose scale is trained with the weights.

Before: a `QuantizationSpec` with `LearnedStepSizeFakeQuantize` (or its `with_args`) as its constructor.
After: a fake quantize in the prepared model whose `scale` is a parameter, so any optimizer over
`model.parameters()` trains it; convert reads the scale that was learned.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import FakeQuantizeBase

from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.observers.scheme import integer_range

_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)
_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
_QSCHEMES = (torch.per_tensor_affine, torch.per_tensor_symmetric, *_PER_CHANNEL)


class LearnedStepSizeFakeQuantize(FakeQuantizeBase):
    """Quantizes and dequantizes with a step size that is trained by backpropagation (LSQ).

    Esser et al., "Learned Step Size Quantization", ICLR 2020: the gradient to the input is 1 inside the
    range and 0 outside; the gradient to the step is `round(v) - v` inside (v = x / scale) and the bound
    outside, times 1 / sqrt(N * Qp), where N is the number of values that share the step and Qp the
    number of steps to the far end of the range. The first batch sets the step to 2 * mean|x| / sqrt(Qp),
    and the zero point of an affine scheme, which stays there, so that zero remains exact.

    The forward is torch's fake quantize, which agrees bit for bit with quantize and dequantize.

    Attributes:
        scale: the step size, a parameter of shape (1,) or (channels,).
        zero_point: int32 of the same shape.
        has_data: whether a first batch, or a loaded state, has set the step.
    """

    scale: nn.Parameter
    zero_point: Tensor
    initialized: Tensor

    def __init__(
        self,
        dtype: torch.dtype = torch.int8,
        quant_min: int | None = None,
        quant_max: int | None = None,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        ch_axis: int = 0,
        batch_axis: int | None = None,
        eps: float = torch.finfo(torch.float32).eps,
        is_dynamic: bool = False,
    ) -> None:
        """Makes a fake quantize that waits for its first batch.

        Args:
            dtype: the integer dtype to quantize to.
            quant_min: least quantized value, by default the dtype's.
            quant_max: greatest quantized value, by default the dtype's.
            qscheme: per tensor or per channel, symmetric or affine.
            ch_axis: the axis of the channels, for per-channel schemes.
            batch_axis: the axis that does not count in N: 0 for activations, None for weights.
            eps: the least step size.
            is_dynamic: must be false; a range that is chosen at run time cannot be learned.

        Raises:
            ConfigError: an argument does not describe a static integer quantization.
        """
        super().__init__()
        self.dtype, self.qscheme, self.is_dynamic = dtype, qscheme, is_dynamic
        self.is_per_channel = qscheme in _PER_CHANNEL
        self.ch_axis = ch_axis if self.is_per_channel else -1
        self.batch_axis, self.eps = batch_axis, eps
        self._require_static_integers()
        self.quant_min, self.quant_max = integer_range(dtype, quant_min, quant_max, False, "A learned step size")
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("zero_point", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("initialized", torch.zeros(1, dtype=torch.uint8))

    def _require_static_integers(self) -> None:
        if self.dtype.is_floating_point or self.is_dynamic or self.qscheme not in _QSCHEMES:
            found = f"dtype {self.dtype}, qscheme {self.qscheme}, is_dynamic {self.is_dynamic}"
            raise ConfigError(
                f"A learned step size needs a static integer quantization, found {found}; choose another observer "
                "for this spec."
            )

    @property
    def has_data(self) -> bool:
        """Whether the step size comes from data rather than from the constructor."""
        return bool(self.initialized)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x quantized and dequantized, or x itself while fake quantization is disabled."""
        if not self.has_data and self.observer_enabled[0] == 1:
            self._start(x.detach())
        if self.fake_quant_enabled[0] == 0:
            return x
        self._require_data()
        # Through `data`, because a step that two tensors share may be between its forward and its backward.
        self.scale.data.clamp_(min=self.eps)
        axis = self.ch_axis if self.is_per_channel else None
        result: Tensor = _LearnedStep.apply(  # type: ignore[no-untyped-call]
            x, self.scale, self.zero_point, axis, self.quant_min, self.quant_max, self._gradient_scale(x)
        )
        return result

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Returns the learned scale and the zero point, each of shape (1,) or (channels,).

        Raises:
            CalibrationError: no batch has been seen.
        """
        self._require_data()
        return self.scale.detach().clamp(min=self.eps), self.zero_point

    def _require_data(self) -> None:
        if not self.has_data:
            raise CalibrationError(
                "A learned step size has seen no data with its observer enabled; run the prepared model on a batch."
            )

    @torch.no_grad()
    def _start(self, x: Tensor) -> None:
        rows = x.transpose(0, self.ch_axis).flatten(1) if self.is_per_channel else x.reshape(1, -1)
        zero_point = torch.zeros(rows.shape[0], dtype=torch.int32, device=x.device)
        if self.qscheme not in _SYMMETRIC:
            least, greatest = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
            step = ((greatest - least) / (self.quant_max - self.quant_min)).clamp(min=self.eps)
            zero_point = (self.quant_min - least / step).round().clamp(self.quant_min, self.quant_max).int()
        elif self.quant_min == 0:
            zero_point += (self.quant_min + self.quant_max + 1) // 2
        self.zero_point = zero_point
        # The parameter stays the same object, so that an optimizer that was made before still trains it.
        self.scale.data = (2 * rows.abs().mean(1).float() / self._far_steps().sqrt()).clamp(min=self.eps)
        self.initialized.fill_(1)

    def _far_steps(self) -> Tensor:
        """Returns Qp: the number of steps between zero and the far end of the range."""
        return torch.maximum(self.quant_max - self.zero_point, self.zero_point - self.quant_min).clamp(min=1).float()

    def _gradient_scale(self, x: Tensor) -> Tensor:
        sharing = x.numel() // self.scale.numel()
        if self.batch_axis is not None:
            sharing //= max(1, x.shape[self.batch_axis])
        return 1.0 / (max(1, sharing) * self._far_steps()).sqrt()

    def extra_repr(self) -> str:
        """Returns the quantization in a few words, for printed models."""
        return f"{self.dtype}, {self.quant_min}..{self.quant_max}, {self.qscheme}, scale={self.scale.data}"

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # A state that was saved after the first batch has as many steps as channels; ours may still have one.
        for name, tensor in (("scale", self.scale.data), ("zero_point", self.zero_point)):
            loaded = state_dict.get(prefix + name)
            if isinstance(loaded, Tensor) and loaded.shape != tensor.shape:
                resized = tensor.new_empty(loaded.shape)
                if name == "scale":
                    self.scale.data = resized
                else:
                    self.zero_point = resized
        super()._load_from_state_dict(state_dict, prefix, *args)


class _LearnedStep(torch.autograd.Function):
    """Fake quantization with the gradients of the straight-through estimator and of the step size."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        axis: int | None,
        least: int,
        greatest: int,
        factor: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point, factor)
        ctx.axis, ctx.least, ctx.greatest = axis, least, greatest
        if axis is None:
            return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, least, greatest)
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, least, greatest)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, scale, zero_point, factor = ctx.saved_tensors
        shape = [1] * x.dim()
        if ctx.axis is not None:
            shape[ctx.axis] = -1
        step, zero = scale.reshape(shape), zero_point.reshape(shape)
        position = x / step
        low, high = ctx.least - zero, ctx.greatest - zero
        inside = (position >= low) & (position <= high)
        bound = torch.minimum(torch.maximum(position, low), high)
        per_step = torch.where(inside, position.round() - position, bound) * gradient
        others = [i for i in range(x.dim()) if i != ctx.axis]
        to_scale = per_step.sum(others) if others else per_step
        return gradient * inside, to_scale.reshape(scale.shape) * factor, None, None, None, None, None
