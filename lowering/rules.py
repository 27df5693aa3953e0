"""A lowering that is nothing but rules: pieces of the q/dq graph become calls of a backend's own operators.

Before: a converted graph, which is spelled plainly first, and rules from pieces of it to operators of
`torch.ops`, such as those that a package registers with `torch.library`. After: an exported program of those
operators, with what no rule took computed in float between dequantize and quantize.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import LoweringError, first_line
from quantplug.core.graph.editing import finish
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.graph.meta import LIMITS
from quantplug.core.patterns.language import Match
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.nodes import is_qdq
from quantplug.core.specs.decision import decision
from quantplug.lowering.open_sizes import open_sizes
from quantplug.lowering.placement import place, record
from quantplug.lowering.reference import ReferenceProgram
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.starting import starting


def lower_by_rules(
    converted: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    *,
    rules: Iterable[Rule],
    library: str = "",
    dynamic_shapes: Any = None,
) -> ReferenceProgram:
    """Lowers a q/dq graph by rules alone; `functools.partial(lower_by_rules, rules=...)` is a backend's lowering.

    Args:
        converted: the graph module that `convert_pt2e` returned; it is not changed.
        example_inputs: positional inputs, as for `torch.export.export`; the program is run on them.
        rules: tried at every node in graph order, the first that fits wins. They see the plain spelling of a graph:
            `conv2d` for `convolution` and paddings in words, `linear` for `addmm` and `mm` by constants, `max_pool2d`
            for `max_pool2d_with_indices`, sizes for each dimension. No rule takes an operator whose numbers lie beyond
            what its row lets the lowering compute in float (`rescaling(..., or_float=True)`, `adding_pairs`).
        library: the namespace of the kernels, so that `ops` knows them; operators on integers count anyway.
        dynamic_shapes: as for `torch.export.export`; None for the sizes that are dynamic in the graph itself.

    Raises:
        ModelError: `converted` is no graph module.
        LoweringError: a rule left a graph that is not well formed or does not run on these inputs.
    """
    source = require_graph_module(converted, "lower")
    module = starting(source)
    recorded = record(module.graph)
    spell_plainly(module.graph)
    apply(module.graph, map(_within_limits, rules))
    try:
        finish(module)
        shapes = open_sizes(module.graph, example_inputs) or dynamic_shapes
        exported = torch.export.export(module, example_inputs, dynamic_shapes=shapes)
        program = ReferenceProgram(exported, place(recorded, module.graph, (library,)))
        program(*example_inputs)
    except Exception as error:
        raise LoweringError(
            f"The graph that the rules left does not run on the example inputs ({first_line(error)}); "
            "mend the rule whose operator it names, or pass inputs like those the model was exported with."
        ) from error
    return program


def _within_limits(rule: Rule) -> Rule:
    """Returns a rule that leaves alone what conversion decided to compute in float."""

    def rewrite(match: Match) -> fx.Node | str:
        return next(filter(None, map(_beyond, match.nodes)), None) or rule.rewrite(match)

    return Rule(rule.pattern, rewrite)


def _beyond(node: fx.Node) -> str | None:
    """Returns why an operator is computed in float for its numbers, between the conversions that it has, or None."""
    decided = None if is_qdq(node) else decision(node)
    return decided.why if decided is not None and not decided.quantized and LIMITS.on(node) else None
