"""Weights in four bits: one scale for a group of input channels, and which operators may have them."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torchao.quantization.pt2e import MappingType, PerGroup
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from quantplug.core.errors import ConfigError
from quantplug.core.graph.facts import tensor_value
from quantplug.core.graph.operators import operator_overloads
from quantplug.core.patterns.language import Match
from quantplug.core.peers.torchao_names import AffineQuantizedMinMaxObserver
from quantplug.core.specs.dtypes import group_size
from quantplug.core.specs.stored_dtypes import stored_range

FOUR_BITS, EIGHT_BITS = (-8, 7), (-127, 127)
_OUTPUTS_FIRST = operator_overloads("linear")


@cache
def group_weight_spec(
    group_size: int = 32, limits: tuple[int, int] = FOUR_BITS, *, is_qat: bool = False
) -> QuantizationSpec:
    """Returns the symmetric spec of weights with one scale for each group of input channels.

    Args:
        group_size: input channels in a group.
        limits: least and greatest integer, those of 4 bits unless given.
        is_qat: whether the spec makes a fake quantize for training instead of an observer.

    Raises:
        ConfigError: the group size is no positive multiple of 32, which is what kernels read at once.
    """
    if not isinstance(group_size, int) or group_size <= 0 or group_size % 32:
        raise ConfigError(f"group_size is {group_size!r}; pass a positive multiple of 32.")
    options = {
        "mapping_type": MappingType.SYMMETRIC,
        "target_dtype": torch.int8,
        "granularity": PerGroup(group_size),
        "quant_min": limits[0],
        "quant_max": limits[1],
        "eps": torch.finfo(torch.float32).eps,
    }
    if not is_qat:
        return QuantizationSpec(torch.int8, AffineQuantizedMinMaxObserver.with_args(**options), *limits)
    from quantplug.core.observers.groups import GroupFakeQuantize  # a declaration trains nothing

    trained = GroupFakeQuantize.with_args(observer=AffineQuantizedMinMaxObserver, **options)
    return QuantizationSpec(torch.int8, trained, *limits)


def in_groups(
    make: Callable[..., QuantizationConfig],
    group_size: int = 32,
    limits: tuple[int, int] = FOUR_BITS,
    **options: Any,
) -> QuantizationConfig:
    """Returns a config with weights of one scale for each group of input channels.

    Args:
        make: makes the config for the activations.
        group_size: input channels in a group.
        limits: least and greatest integer, those of 4 bits unless given.
        options: for `make`; none about the weights.

    Raises:
        ConfigError: an option is about the weights, or the group size is no positive multiple of 32.
    """
    found = next((name for name in options if name.startswith("weight_")), None)
    if found is not None:
        raise ConfigError(
            f"'{found}' says nothing of weights in groups, whose ranges are the least and the greatest of each group; "
            "leave it out."
        )
    config = make(**options)
    return replace(config, weight=group_weight_spec(group_size, limits, is_qat=config.is_qat))


def whole_groups(match: Match, config: QuantizationConfig) -> str | None:
    """Holds unless the weight "w" is quantized in groups that do not divide its input channels.

    Args:
        match: a match that binds "w", the weight, and "op", the operator.
        config: what would be applied.
    """
    size, weight = group_size(config.weight), tensor_value(match["w"])
    if size is None:
        return None
    if match["op"].target not in _OUTPUTS_FIRST:
        return "its weight has the input channels first, and groups lie along the last dimension"
    channels = None if weight is None else int(weight.shape[-1])
    if channels is None or channels % size == 0:
        return None
    return f"its {channels} input channels are no multiple of the group of {size}"


def groups_of(*sizes: int) -> Callable[[Match | None, QuantizationConfig], str | None]:
    """Returns what holds for weights in groups of sizes that the kernel reads, and for those without groups.

    Args:
        sizes: numbers of input channels that share a scale.
    """

    def check(match: Match | None, config: QuantizationConfig) -> str | None:
        size = group_size(config.weight)
        if size in (None, *sizes):
            return None
        return f"the config has a scale for every {size} input channels, the kernel for {' or '.join(map(str, sizes))}"

    return check


def no_groups(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds unless the config has weights with several scales for an output channel.

    Args:
        match: not looked at.
        config: what would be applied.
    """
    size = group_size(config.weight)
    return None if size is None else f"the config has a scale for every {size} input channels, the kernel takes one"


def groups_beside_floats(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds unless the config has weights in groups beside activations that are quantized."""
    size = group_size(config.weight)
    if size is None or config.input_activation is None:
        return None
    return f"the config has a scale for every {size} input channels, whose kernel takes float activations"


def groups_beside_run_time(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds unless the config has weights in groups that XNNPACK's kernels do not read.

    They read -8..7, beside activations with scales of run time.
    """
    size, activation = group_size(config.weight), config.input_activation
    if size is None or config.weight is None:
        return None
    if activation is None or not activation.is_dynamic:
        return (
            f"the config has a scale for every {size} input channels, whose kernel takes inputs quantized at run time"
        )
    low, high = stored_range(config.weight)
    if FOUR_BITS[0] <= low and high <= FOUR_BITS[1]:
        return None
    return f"its weights are {low}..{high}, and the kernel with a scale for every {size} input channels reads -8..7"


def whole_bytes(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds unless the config has weights of four bits, for operators whose kernels hold eight."""
    return "the kernels with weights of four bits are those of linear" if _is_narrow(config.weight) else None


def pairs_of_channels(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for weights "w" of four bits that XNNPACK's linear kernels read.

    Beside activations with scales of run time an odd number of input channels gives wrong
    results (ExecuTorch 1.4: -3 to 2 dB of the graph, from the second row on), and a single weight ends the process.
    """
    activation, weight = config.input_activation, tensor_value(match["w"])
    if not _is_narrow(config.weight) or weight is None:
        return None
    if weight.numel() == 1:
        return "its weight is a single number, which the runtime does not read in four bits"
    channels = int(weight.shape[-1 if match["op"].target in _OUTPUTS_FIRST else 0])
    if activation is not None and activation.is_dynamic and channels % 2:
        return f"its {channels} input channels are odd, the kernel reads weights of four bits in pairs"
    return None


def bits_beside(weight: QuantizationSpec, activation: QuantizationSpec | None) -> int:
    """Returns how many bits XNNPACK's files take for each number of a weight, which depends on the input's kernel."""
    low, high = stored_range(weight)
    has_kernel = (activation is None or activation.is_dynamic) and high - low <= FOUR_BITS[1] - FOUR_BITS[0]
    return 4 if has_kernel else 8


def _is_narrow(spec: object) -> bool:
    low, high = stored_range(spec) if isinstance(spec, QuantizationSpec) else (-128, 127)
    return high - low <= FOUR_BITS[1] - FOUR_BITS[0]
