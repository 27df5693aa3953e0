"""What XNNPACK does not compute: the reason against an operator, and what is written in its place.

Before: a q/dq graph. After: the same reals; the names of what has to stay float or portable, and why.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.graph.facts import operator_name, rank, tensor_value
from quantplug.core.graph.operators import CLAMPS, schema_names
from quantplug.core.patterns.language import Match
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.calls import QuantizedCall, quantized_calls
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import static_qparams
from quantplug.core.specs.limits import XNNPACK_RATIOS
from quantplug.lowering.rewrites.writing import open_among

TRANSPOSED = ("aten::conv_transpose1d", "aten::conv_transpose2d")
# What ExecuTorch serializes as a reshape by numbers, or, as conv1d, as a conv2d between two of them.
_RESHAPES = ("aten::squeeze", "aten::squeeze_", "aten::unsqueeze", "aten::unsqueeze_", "aten::conv1d")
# Whose scales XNNPACK's kernels express in some ratios alone, and which of its limits that is.
_RATIOS_OF = {
    **dict.fromkeys(("aten::add", "aten::sub"), "add"),
    "aten::mul": "mul",
    **dict.fromkeys(schema_names((*CLAMPS, "leaky_relu", "mean", "adaptive_avg_pool2d")), "convert"),
}
FLOAT_RESULT = "the layer before it yields floats"
_GROWS = "XNNPACK's integer mean is wrong in calls that are larger than an earlier one, and its size is open"


@dataclass
class Legalized:
    """What legalization found out about the operators of a graph, by their names.

    Attributes:
        floats: operators that must run in float although their neighbours are quantized, and why.
        weight_only: linear operators with integer weights and float activations.
        portable: operators that must stay outside the delegates, and why.
        notes: how operators run otherwise than the q/dq graph says.
    """

    floats: dict[str, str] = field(default_factory=dict)
    weight_only: dict[str, str] = field(default_factory=dict)
    portable: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def _as_it_stands(working: fx.GraphModule, call: QuantizedCall) -> None:
    pass


@dataclass(frozen=True)
class Refusal:
    """Operators that XNNPACK does not take everywhere.

    Attributes:
        operators: their names.
        why: returns the reason against one of them, None where it is taken.
        instead: rewrites one that is not taken, in place; it keeps its name.
        otherwise: the same of one that is taken.
    """

    operators: Iterable[str]
    why: Callable[[QuantizedCall], str | None]
    instead: Callable[[fx.GraphModule, QuantizedCall], None] = _as_it_stands
    otherwise: Callable[[fx.GraphModule, QuantizedCall], None] = _as_it_stands


def refused(working: fx.GraphModule, refusal: Refusal) -> dict[str, str]:
    """Returns the names of the operators that are not taken, each with the reason, when they are rewritten."""
    found: dict[str, str] = {}
    for call in quantized_calls(working.graph, refusal.operators):
        reason = refusal.why(call)
        if reason is not None:
            found[call.node.name] = reason
        (refusal.otherwise if reason is None else refusal.instead)(working, call)
    return found


def _out_of_range(call: QuantizedCall) -> str | None:
    read = [leaf for leaf in pytree.tree_leaves((call.node.args, call.node.kwargs)) if is_dequantize(leaf)]
    scales = [params.scale for params in map(static_qparams, read) if params is not None]
    if call.output is None or not scales:
        return None
    return XNNPACK_RATIOS[_RATIOS_OF[operator_name(call.node)]].objection(scales, call.output.scale)


def _grows(node: fx.Node) -> str | None:
    """Integer means whose number of sums differs between calls: ExecuTorch 1.4's keep the memory of an earlier size."""
    return _GROWS if _open_sizes(node) else None


def _open_sizes(node: fx.Node) -> int:
    value = tensor_value(node)
    return 0 if value is None else open_among(value.shape)


def _other_maxima(call: QuantizedCall) -> str | None:
    """Maxima that ExecuTorch hands to XNNPACK, and whose delegates then are not written or do not load."""
    if "dim" not in call.operands:
        return None
    if call.operands["dim"] not in (2, 3) or not call.operands["keepdim"]:
        return "ExecuTorch writes maxima of images for XNNPACK along dimension 2 or 3 that stays, no others"
    return "XNNPACK's maxima have static sizes, and one is open" if _open_sizes(call.input) else None


def _slopes_of_other_ranks(call: QuantizedCall) -> str | None:
    """Prelus that are no images: ExecuTorch hands them to XNNPACK, and turns every input's channels last."""
    dimensions = rank(call.input)
    return None if dimensions == 4 else f"XNNPACK's prelu takes images of four dimensions, not {dimensions}"


def wide_output_padding(call: QuantizedCall) -> str | None:
    """Transposed convolutions that add a step of their stride or more, which no kernel of XNNPACK does."""
    added, stride = (call.operands.get(name, ()) for name in ("output_padding", "stride"))
    wide = any(more >= step for more, step in zip(added, stride, strict=False))
    return f"its output padding {list(added)} is not less than its stride {list(stride)}" if wide else None


def _rounded_factors(call: QuantizedCall) -> str | None:
    """Resizing by rounded factors: ExecuTorch hands it to XNNPACK, which takes the ratios of sizes."""
    factors, image = call.operands["scale_factors"] or (), tensor_value(call.input)
    sizes = () if image is None else tuple(image.shape[2:])
    rounds = any(isinstance(size, int) and size * factor % 1 for size, factor in zip(sizes, factors, strict=False))
    if call.operands["align_corners"] or not rounds:
        return None
    return f"its factors {list(factors)} of {list(sizes)} are rounded, and XNNPACK's are ratios of sizes"


def too_many_open_sizes(call: QuantizedCall) -> str | None:
    """Reshapes of two open sizes or more: ExecuTorch hands them to XNNPACK, and its serializer fails on them."""
    number = _open_sizes(call.node)
    if number < 2:
        return None
    return f"{number} of its sizes are open, and XNNPACK reshapes with at most one; export the others static"


def adds_less_than_a_step(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds for transposed convolutions that add less to their result than one step of their stride."""
    return wide_output_padding(QuantizedCall.of(match["op"]))


def resizes_by_ratios(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds for resizing by the ratios of its sizes, as XNNPACK takes every factor to be."""
    return _rounded_factors(QuantizedCall.of(match["op"]))


def means_of_one_size(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds for means whose results have one size in all calls."""
    return _grows(match["op"])


def reshapes_one_open_size(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds unless ExecuTorch serializes an operator as a reshape, and two or more sizes of its result are open."""
    return too_many_open_sizes(QuantizedCall.of(match["op"])) if operator_name(match["op"]) in _RESHAPES else None


def activation_of_integers(match: Match, config: QuantizationConfig) -> str | None:
    """Holds unless an activation stands behind a layer that yields floats, fused into its kernel or not."""
    return FLOAT_RESULT if config.output_activation is None and "activation" in match else None


SCALES_OUT_OF_RANGE = Refusal(tuple(_RATIOS_OF), _out_of_range)
MEANS = Refusal(
    ("aten::mean", "aten::adaptive_avg_pool2d"), lambda call: _grows(call.node) if call.yielded is not None else None
)
PORTABLE = (
    Refusal(("aten::prelu",), _slopes_of_other_ranks),
    Refusal(TRANSPOSED, wide_output_padding),
    Refusal(("aten::upsample_bilinear2d",), _rounded_factors),
    Refusal(_RESHAPES, too_many_open_sizes),
    Refusal(("aten::max",), _other_maxima),
    Refusal(("aten::im2col",), lambda _: "delegates with the pieces that ExecuTorch writes it in do not load"),
)
