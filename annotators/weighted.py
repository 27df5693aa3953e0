"""What every operator with a constant weight has in common: its specs and its batch norm in training."""

from dataclasses import replace

import torch
from torch import fx
from torchao.quantization.pt2e import PerAxis, PerToken
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpecBase

from quantplug.annotators.constraints import qat_only
from quantplug.annotators.fusion import annotate_piece
from quantplug.annotators.presets import activation_spec, row_spec, weight_spec
from quantplug.annotators.qspecs import (
    derived_bias_qspec,
    get_input_act_qspec,
    get_output_act_qspec,
    get_weight_qspec,
    on_axis,
)
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.graph.facts import rank
from quantplug.core.graph.operators import operator_overloads
from quantplug.core.observers.rowwise import granularity_of
from quantplug.core.patterns.language import Match
from quantplug.core.specs.dtypes import smallest_scale
from quantplug.core.specs.stored_dtypes import stored_range

_OVER_ROWS = frozenset().union(*(operator_overloads(name) for name in ("linear", "addmm", "mm")))


def annotate_weighted(match: Match, config: QuantizationConfig, channel_axis: int) -> Annotations:
    """Returns the annotations of an operator "op" with input "x", weight "w" and perhaps bias "b".

    Args:
        match: the piece; its last node carries the output.
        config: what to quantize to; a bias spec of dtype int32 asks for the derived bias.
        channel_axis: the axis of the weight that holds the output channels.
    """
    node, source, weight = match["op"], match["x"], match["w"]
    weight_spec = on_axis(get_weight_qspec(config), channel_axis)
    inputs: dict[fx.Node, QuantizationSpecBase | None] = {source: _input_spec(match, config), weight: weight_spec}
    if "b" in match:
        inputs[match["b"]] = derived_bias_qspec(config, node, source, weight, weight_spec)
    return annotate_piece(match, inputs, get_output_act_qspec(config))


def _input_spec(match: Match, config: QuantizationConfig) -> QuantizationSpecBase | None:
    """Returns the spec of the input; a convolution's rows are samples, of which there is one without a batch."""
    spec = get_input_act_qspec(config)
    if granularity_of(spec) != PerToken() or match["op"].target in _OVER_ROWS:
        return spec
    if rank(match["x"]) != rank(match["w"]):
        return activation_spec(mode="dynamic", is_qat=config.is_qat)
    return row_spec(is_qat=config.is_qat, granularity=PerAxis(0))


def batch_norm_in_training(match: Match, config: QuantizationConfig) -> str | None:
    """Holds unless the piece has a batch norm and the config is not for training."""
    return qat_only(match, config) if "batch_norm" in match else None


def per_tensor_weight(annotator: Annotator) -> Annotator:
    """Returns the same annotator for kernels that know one scale for the whole weight only.

    A config whose weights are per channel then gives this operator a per-tensor weight of the same range.
    """

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        spec = config.weight
        if spec is None or spec.qscheme not in (torch.per_channel_symmetric, torch.per_channel_affine):
            return annotator.decide(match, config)
        kept = {"is_qat": config.is_qat, "dtype": spec.dtype, "eps": smallest_scale(spec)}
        whole = weight_spec(*stored_range(spec), per_channel=False, **kept)
        return annotator.decide(match, replace(config, weight=whole))

    return replace(annotator, decide=decide)
