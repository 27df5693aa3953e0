"""Operators that only move data: input and output share one scale, so the move is one of integers."""

from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpecBase, SharedQuantizationSpec

from quantplug.annotators.constraints import static_only
from quantplug.annotators.fusion import annotate_piece, in_scale_of_input
from quantplug.annotators.qspecs import get_input_act_qspec
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.graph.operators import DROPOUTS, IDENTITIES, MOVES, PADS, REPEATS
from quantplug.core.patterns.language import Match, Op, dropouts, each, literal, op, value


def movement(names: tuple[str, ...] = (*MOVES, *REPEATS, *IDENTITIES)) -> Annotator:
    """Returns the annotator of operators that move data without changing a value.

    They keep the integer domain between quantized neighbours and start none: only moves whose producer is
    quantized are annotated.

    Args:
        names: operators that move, select or repeat numbers, such as "permute"; all that are known by default.
    """
    patterns = tuple((name.partition(".")[0], move) for name in names for move in _moves(name))
    return Annotator("movement", patterns, in_scale_of_input, (static_only,), follows=("x",), output="shared")


def _moves(name: str) -> tuple[Op, ...]:
    if name in DROPOUTS:
        return dropouts(value("x"), "op", (name,))
    if name in PADS:
        mode: dict[str, Any] = {"mode": "constant"} if name == "pad" else {}
        return (op(name, self=value("x"), value=literal(None, 0, 0.0), name="op", **mode),)
    # The other view, to a dtype, reads the bits of a number as another number.
    return (op("view.default" if name == "view" else name, self=value("x"), name="op"),)


def concatenation(*names: str) -> Annotator:
    """Returns the annotator of cat and stack: all inputs and the output share one observer.

    Args:
        names: "cat", "stack"; each is a rule.
    """

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        node, sources = match["op"], list(dict.fromkeys(match["xs"]))
        shared = SharedQuantizationSpec((sources[0], node))
        inputs: dict[fx.Node, QuantizationSpecBase | None] = dict.fromkeys(sources, shared)
        inputs[sources[0]] = get_input_act_qspec(config)
        return annotate_piece(match, inputs, shared)

    patterns = tuple((name, op(name, tensors=each(value(), "xs"), name="op")) for name in names)
    return Annotator(names[0], patterns, decide, (static_only,), output="shared")
