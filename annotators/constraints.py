"""Constraints that several operator families share: predicates that return None or the reason in words."""

from torchao.quantization.pt2e.quantizer import QuantizationConfig

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
