"""Constraints that several operator families share: predicates that return None or the reason in words."""

from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.annotator import Constraint
from quantplug.core.graph import rank, tensor_value
from quantplug.core.pattern import Match


def static_only(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for configs whose activations have scales that calibration fixes."""
    spec = config.input_activation
    if spec is None:
        return "the config quantizes weights only"
    return "the config quantizes activations dynamically" if spec.is_dynamic else None


def quantizes_weight(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for configs that quantize the weight."""
    return None if config.weight is not None else "the config leaves weights float"


def qat_only(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for configs of quantization-aware training, where batch norms stay in the graph."""
    return None if config.is_qat else "batch norm is folded before annotation unless the config is for training"


def ranks(name: str, *allowed: int) -> Constraint:
    """Returns a constraint on the number of dimensions of a captured tensor."""

    def check(match: Match, config: QuantizationConfig) -> str | None:
        found = rank(match[name])
        if found is None or found in allowed:
            return None
        return f"operand '{name}' has {found} dimensions, the kernel takes {' or '.join(map(str, allowed))}"

    return check


def static_only_for(*kinds: str) -> Constraint:
    """Returns a constraint that refuses dynamic activations for matches whose operator name is one of `kinds`."""

    def check(match: Match, config: QuantizationConfig) -> str | None:
        name = match["op"].target._schema.name.removeprefix("aten::")
        dynamic = config.input_activation is not None and config.input_activation.is_dynamic
        return f"{name} has no kernel for dynamic activations" if dynamic and name in kinds else None

    return check


def floating(name: str) -> Constraint:
    """Returns a constraint that a captured tensor is of a floating point type."""

    def check(match: Match, config: QuantizationConfig) -> str | None:
        found = tensor_value(match[name])
        return None if found is None or found.is_floating_point() else f"operand '{name}' is {found.dtype}"

    return check
