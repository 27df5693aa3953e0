"""Weights in four bits: one scale for a group of input channels, and which operators may have them."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torchao.quantization.pt2e import MappingType, PerGroup
from torchao.quantization.pt2e._affine_quantization import AffineQuantizedMinMaxObserver  # torchao has no public path
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from quantplug.core.dtypes import integer_range
from quantplug.core.errors import ConfigError
from quantplug.core.graph import tensor_value
from quantplug.core.pattern import Match

FOUR_BITS = (-8, 7)


@cache
def group_weight_spec(group_size: int = 32) -> QuantizationSpec:
    """Returns the symmetric 4-bit spec of weights with one scale for each group of input channels.

    Args:
        group_size: input channels in a group.

    Raises:
        ConfigError: the group size is no positive multiple of 32, which is what kernels read at once.
    """
    if not isinstance(group_size, int) or group_size <= 0 or group_size % 32:
        raise ConfigError(f"group_size is {group_size!r}; pass a positive multiple of 32.")
    observer = AffineQuantizedMinMaxObserver.with_args(
        mapping_type=MappingType.SYMMETRIC,
        target_dtype=torch.int8,
        granularity=PerGroup(group_size),
        quant_min=FOUR_BITS[0],
        quant_max=FOUR_BITS[1],
        eps=torch.finfo(torch.float32).eps,
    )
    return QuantizationSpec(torch.int8, observer, *FOUR_BITS)


def in_groups(config: QuantizationConfig, group_size: int = 32) -> QuantizationConfig:
    """Returns a config with 4-bit weights of one scale for each group of input channels.

    Raises:
        ConfigError: the config is for training, or the group size is no positive multiple of 32.
    """
    if config.is_qat:
        raise ConfigError(
            "Config 'int4_dynamic_groups' has no form for training: torchao fakes no quantization in groups; train "
            "with 'int4_dynamic'."
        )
    return replace(config, weight=group_weight_spec(group_size))


def whole_groups(match: Match, config: QuantizationConfig) -> str | None:
    """Holds unless the weight "w" is quantized in groups that do not divide its input channels."""
    size, weight = _group_size(config.weight), tensor_value(match["w"])
    channels = None if weight is None else int(weight.shape[-1])
    if size is None or channels is None or channels % size == 0:
        return None
    return f"its {channels} input channels are no multiple of the group of {size}"


def no_groups(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds unless the config has weights with several scales for an output channel."""
    size = _group_size(config.weight)
    return None if size is None else f"the config has a scale for every {size} input channels, the kernel takes one"


def whole_bytes(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds unless the config has weights of four bits, for operators whose kernels hold eight."""
    spec = config.weight
    low, high = integer_range(spec) if isinstance(spec, QuantizationSpec) else (-128, 127)
    narrow = high - low <= FOUR_BITS[1] - FOUR_BITS[0]
    return "the kernels with weights of four bits are those of linear" if narrow else None


def _group_size(spec: Any) -> int | None:
    constructor = getattr(getattr(spec, "observer_or_fake_quant_ctr", None), "p", None)
    granularity = getattr(constructor, "keywords", {}).get("granularity")
    return getattr(granularity, "group_size", None)
