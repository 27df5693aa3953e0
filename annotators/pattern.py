"""Any pattern as a rule, for operators of one's own: what is quantized, and where the output's scale comes from."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationConfig,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

from quantplug.annotators.constraints import quantizes_weight, static_only
from quantplug.annotators.fusion import annotate_piece
from quantplug.annotators.qspecs import get_input_act_qspec, get_output_act_qspec, on_axis
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.errors import ConfigError
from quantplug.core.patterns.language import Match, Pattern
from quantplug.core.specs.stored_dtypes import stored_range

# For each observation of activations, where the scale of the output comes from.
OBSERVATIONS: Mapping[str, str] = MappingProxyType(
    {"own": "own", "shared": "shared", "fixed": "fixed", "none": "float"}
)


def pattern_annotator(
    name: str,
    *patterns: Pattern,
    inputs: tuple[str, ...] = ("x",),
    weights: Mapping[str, int] | None = None,
    observation: str = "own",
    qparams: tuple[float, int] | None = None,
) -> Annotator:
    """Returns the annotator of pieces that a kernel runs as a whole: nothing is quantized inside of them.

    Args:
        name: the rule, as reports show it.
        patterns: forms of the piece; each binds the operator that reads the inputs to "op".
        inputs: captures that are activations; a list capture stands for all its elements.
        weights: captures that are weights, each with the axis of its channels.
        observation: "own" if the output has a range of its own, "shared" if all inputs and the output are in one
            scale, "fixed" if the qparams of the output are known, "none" if no activation is quantized.
        qparams: the scale and zero point of a fixed output; a config that fixes others keeps them.

    Raises:
        ConfigError: there is no such observation, or it is "fixed" without qparams.
        PatternError: a pattern binds no operator to "op".
    """
    if observation not in OBSERVATIONS:
        raise ConfigError(f"Rule '{name}' has observation '{observation}'; choose one of {list(OBSERVATIONS)}.")
    if observation == "fixed" and qparams is None:
        raise ConfigError(f"Rule '{name}' has a fixed output without qparams; give qparams=(scale, zero_point).")
    axes = dict(weights or {})

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        specs: dict[fx.Node, QuantizationSpecBase | None] = {
            match[weight]: on_axis(config.weight, axis) for weight, axis in axes.items()
        }
        if observation == "none":
            return annotate_piece(match, specs, None) if specs else {}
        sources = _sources(match, inputs)
        specs |= dict.fromkeys(sources, get_input_act_qspec(config))
        if observation == "own":
            return annotate_piece(match, specs, get_output_act_qspec(config))
        if observation == "fixed":
            return annotate_piece(match, specs, _fixed(get_output_act_qspec(config), qparams))
        shared = SharedQuantizationSpec((sources[0], match["op"]))
        return annotate_piece(match, specs | dict.fromkeys(sources[1:], shared), shared)

    observed = () if observation == "none" else (static_only,)
    constraints = (quantizes_weight,) if axes else observed
    labelled = tuple((name, pattern) for pattern in patterns)
    return Annotator(name, labelled, decide, constraints, output=OBSERVATIONS[observation])


def _sources(match: Match, captures: tuple[str, ...]) -> list[fx.Node]:
    """Returns the captured nodes in order, each once: `x + x` has one input edge."""
    found = (match[name] for name in captures)
    return list(dict.fromkeys(node for one in found for node in (one if isinstance(one, list | tuple) else (one,))))


def _fixed(spec: QuantizationSpecBase | None, qparams: tuple[float, int] | None) -> QuantizationSpecBase | None:
    if spec is None or isinstance(spec, FixedQParamsQuantizationSpec):
        return spec
    assert qparams is not None
    scale, zero_point = qparams
    low, high = stored_range(spec)
    scheme = spec.qscheme or torch.per_tensor_affine
    return FixedQParamsQuantizationSpec(spec.dtype, scale, zero_point, low, high, scheme)
