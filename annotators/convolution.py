"""Convolutions, also transposed, with optional bias, batch norm (training) and fused activation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.constraints import quantizes_weight
from quantplug.annotators.fusion import with_activations, with_batch_norm
from quantplug.annotators.weighted import annotate_weighted, batch_norm_in_training
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.graph.facts import operands
from quantplug.core.graph.operators import CLAMPS
from quantplug.core.patterns.language import Match, constant, op, optional, value


def convolution(
    dims: tuple[int, ...] = (1, 2), activations: tuple[str, ...] = tuple(CLAMPS), label: str = "conv"
) -> Annotator:
    """Returns the annotator of convolutions over 1, 2 or 3 spatial dimensions.

    Args:
        dims: numbers of spatial dimensions.
        activations: activations that the kernel fuses.
        label: what its rules are called; one of its own for each row where kernels differ by dimensions.
    """
    return _family(label, [f"conv{d}d" for d in dims], dims, activations, transposed=False)


def transposed_convolution(dims: tuple[int, ...] = (1, 2), activations: tuple[str, ...] = tuple(CLAMPS)) -> Annotator:
    """Returns the annotator of transposed convolutions; their output channels are on axis 1 of the weight.

    Args:
        dims: numbers of spatial dimensions.
        activations: activations that the kernel fuses, such as "relu".
    """
    return _family("conv_transpose", [f"conv_transpose{d}d" for d in dims], dims, activations, transposed=True)


def _family(
    label: str, names: list[str], dims: tuple[int, ...], activations: tuple[str, ...], *, transposed: bool
) -> Annotator:
    operands_: dict[str, Any] = {"input": value("x"), "weight": constant("w"), "bias": optional(constant("b"))}
    whole = op(*names, name="op", **operands_)
    decomposed = op("convolution", name="op", transposed=transposed, **operands_).where(_spatial_dims(dims))
    patterns = tuple(
        labelled
        for base in (whole, decomposed)
        for labelled in (*with_activations(label, base, activations), *with_batch_norm(label, base, activations))
    )
    return Annotator(label, patterns, _decide, (quantizes_weight, batch_norm_in_training))


def _spatial_dims(dims: tuple[int, ...]) -> Callable[[Match], str | None]:
    def check(match: Match) -> str | None:
        found = len(operands(match["op"])["stride"])
        return None if found in dims else f"a convolution over {found} dimensions, not {' or '.join(map(str, dims))}"

    return check


def _decide(match: Match, config: QuantizationConfig) -> Annotations:
    return annotate_weighted(match, config, _output_channel_axis(match["op"]))


def _output_channel_axis(node: fx.Node) -> int:
    if node.target is torch.ops.aten.convolution.default:
        return int(bool(operands(node)["transposed"]))
    return int("transpose" in str(node.target))
