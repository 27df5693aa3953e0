"""Quantization specs: the four accessors of a config, and the specs that annotators make from it.

The accessors carry torchao's names and meaning, None passes through, and a spec that no kernel of the
field runs is an error here instead of an assertion. The other functions build shared, fixed and derived
specs for the operators where they belong.
"""

from dataclasses import replace

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e import ObserverOrFakeQuantize
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationConfig,
    QuantizationSpec,
    QuantizationSpecBase,
)

from quantplug.core.errors import ConfigError
from quantplug.core.specs.stored_dtypes import stored_range
from quantplug.core.specs.written import register_for_plans

_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric, None)
_PER_CHANNEL = (torch.per_channel_symmetric, torch.per_channel_affine)


def get_input_act_qspec(config: QuantizationConfig | None) -> QuantizationSpec | None:
    """Returns the spec of input activations, or None where they stay float.

    Args:
        config: a config of torchao's, or None for float.

    Raises:
        ConfigError: the spec is not per tensor.
    """
    return _per_tensor(config.input_activation, "input activation") if config else None


def get_output_act_qspec(config: QuantizationConfig | None) -> QuantizationSpec | None:
    """Returns the spec of output activations, or None where they stay float (dynamic, weight-only).

    Args:
        config: a config of torchao's, or None for float.

    Raises:
        ConfigError: the spec is not per tensor.
    """
    return _per_tensor(config.output_activation, "output activation") if config else None


def get_weight_qspec(config: QuantizationConfig | None) -> QuantizationSpec | None:
    """Returns the spec of weights, or None where they stay float.

    Args:
        config: a config of torchao's, or None for float.

    Raises:
        ConfigError: the spec is neither symmetric nor without a scheme.
    """
    spec = config.weight if config else None
    if spec is not None and spec.qscheme not in (torch.per_tensor_symmetric, torch.per_channel_symmetric, None):
        raise ConfigError(
            f"The weight spec has qscheme {spec.qscheme}; choose torch.per_tensor_symmetric or "
            "torch.per_channel_symmetric, kernels take no weight with a zero point."
        )
    return spec


def get_bias_qspec(config: QuantizationConfig | None) -> QuantizationSpec | None:
    """Returns the spec of biases: None or torch.float for float, torch.int32 for a derived integer bias.

    Args:
        config: a config of torchao's, or None for float.

    Raises:
        ConfigError: the spec has another dtype.
    """
    spec = config.bias if config else None
    if spec is not None and spec.dtype not in (torch.float, torch.int32):
        raise ConfigError(
            f"The bias spec has dtype {spec.dtype}; choose torch.int32 (scale derived from input and weight) "
            "or no spec at all (float)."
        )
    return spec


def _per_tensor(spec: QuantizationSpec | None, what: str) -> QuantizationSpec | None:
    if spec is not None and spec.qscheme not in _PER_TENSOR:
        raise ConfigError(f"The {what} spec has qscheme {spec.qscheme}; choose a per-tensor qscheme.")
    return spec


def on_axis(spec: QuantizationSpec | None, axis: int) -> QuantizationSpec | None:
    """Returns a per-channel weight spec for the axis on which this operator keeps its output channels.

    Args:
        spec: a weight's spec, or None for float.
        axis: that of the output channels in the weight, such as 1 of a transposed convolution's.
    """
    if spec is None or spec.qscheme not in _PER_CHANNEL or spec.ch_axis == axis:
        return spec
    return replace(spec, ch_axis=axis)


def fixed_qspec(spec: QuantizationSpec | None, low: float, high: float) -> FixedQParamsQuantizationSpec | None:
    """Returns the fixed spec of an output whose range is known: [low, high) spread over the integer range.

    The step is (high - low) / 2**bits, a power of two for sigmoid, softmax and tanh, which is what
    integer kernels of these functions are built for (TensorFlow Lite 8-bit quantization specification).

    Args:
        spec: the activation spec whose dtype and range the output gets.
        low: the real value that the smallest integer stands for.
        high: the real value just above the largest integer.
    """
    if spec is None:
        return None
    low_int, high_int = stored_range(spec)
    scale = (high - low) / (high_int - low_int + 1)
    return FixedQParamsQuantizationSpec(
        dtype=spec.dtype,
        scale=scale,
        zero_point=low_int - round(low / scale),
        quant_min=low_int,
        quant_max=high_int,
        qscheme=spec.qscheme or torch.per_tensor_affine,
    )


def derived_bias_qspec(
    config: QuantizationConfig,
    operator: fx.Node,
    source: fx.Node,
    weight: fx.Node,
    weight_spec: QuantizationSpecBase | None,
) -> DerivedQuantizationSpec | None:
    """Returns the int32 spec of a bias, scale = input scale * weight scale, or None if the bias stays float.

    Per-channel weights give one bias scale a channel, on axis 0 of the bias.

    Args:
        config: its bias spec asks for the derived bias with dtype torch.int32.
        operator: the convolution or linear that adds the bias.
        source: the operator's input activation.
        weight: the operator's weight.
        weight_spec: the spec of the weight, or None if it stays float.

    Raises:
        ConfigError: the config asks for an int32 bias, but input or weight have no scale to derive it from.
    """
    spec = get_bias_qspec(config)
    if spec is None or spec.dtype != torch.int32:
        return None
    activation = get_input_act_qspec(config)
    if activation is None or activation.is_dynamic or weight_spec is None:
        raise ConfigError(
            "The config asks for an int32 bias, whose scale is that of the input times that of the weight, but "
            "does not quantize both statically; leave the bias float."
        )
    per_channel = getattr(weight_spec, "qscheme", None) in _PER_CHANNEL
    return DerivedQuantizationSpec(
        derived_from=[(source, operator), (weight, operator)],
        derive_qparams_fn=product_of_scales,
        dtype=torch.int32,
        quant_min=-(2**31),
        quant_max=2**31 - 1,
        qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
        ch_axis=0 if per_channel else None,
    )


def product_of_scales(observers: list[ObserverOrFakeQuantize]) -> tuple[Tensor, Tensor]:
    """Returns (scale, zero point) of a bias from the observers of input and weight, in either order.

    The scale is the product of both scales (Jacob et al. 2018, equation 11), the zero point 0; the shape
    is that of the scale with more elements.
    """
    first, second = (observer.calculate_qparams()[0] for observer in observers)
    scale = (first.to(torch.float32) * second.to(torch.float32)).reshape(-1)
    return scale, torch.zeros_like(scale, dtype=torch.int32)


register_for_plans(product_of_scales)
