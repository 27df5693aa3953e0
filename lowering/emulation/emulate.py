"""The reference model on integers: every kernel of a target replaced by arithmetic that yields its very bits.

Before: a converted graph. After: a program of integer kernels in PyTorch, and for each operator the level
at which it agrees with the target. It runs where the target does not, and says where the q/dq graph, which
computes in float between dequantize and quantize, differs from the target by a rounding step.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import ConfigError, LoweringError, first_line
from quantplug.core.files.whole import exported_content, write_content
from quantplug.core.graph.editing import erase_dead_code
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.graph.meta import REASON, origins
from quantplug.core.patterns.language import Match
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.specs.levels import Level
from quantplug.lowering.emulation.rows import Row
from quantplug.lowering.open_sizes import open_sizes
from quantplug.lowering.placement import record
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.signature import Signature
from quantplug.lowering.starting import starting, state_of

_NO_KERNEL = "the kernel set has no integer kernel for it in this place"


@dataclass(frozen=True)
class Prepared:
    """A graph that a target's own passes have been over.

    Attributes:
        module: the graph; it is changed in place from here on.
        floats: operators that the target computes in float, and why.
        integers: operators that the passes put on integers already.
    """

    module: fx.GraphModule
    floats: Mapping[str, str] = field(default_factory=dict)
    integers: frozenset[str] = frozenset()


_BUILT_IN = {
    "xnnpack": "quantplug.lowering.xnnpack.emulated:XNNPACK",
    "x86": "quantplug.lowering.x86.emulated:ONEDNN",
    "tosa": "quantplug.lowering.arm.emulated:TOSA",
}

Prepare = Callable[[fx.GraphModule, tuple[Any, ...]], Prepared]


def as_it_stands(module: fx.GraphModule, example_inputs: tuple[Any, ...]) -> Prepared:
    """Returns the q/dq graph itself, for targets without passes of their own.

    Args:
        module: the q/dq graph.
        example_inputs: positional inputs that it runs on.
    """
    return Prepared(module)


@dataclass(frozen=True)
class KernelSet:
    """The integer kernels of a target.

    Attributes:
        name: how errors and tables call it.
        rows: the kernels; the first row that fits an operator takes it.
        conversions: kernels that are tried after all others: quantization of float tensors.
        prepare: the target's passes over the q/dq graph.
    """

    name: str
    rows: tuple[Row, ...]
    conversions: tuple[Row, ...] = ()
    prepare: Prepare = as_it_stands

    @property
    def levels(self) -> dict[str, Level]:
        """The declared level of each operator family."""
        return {row.name: row.level for row in (*self.rows, *self.conversions)}


class EmulatedProgram(Program):
    """A q/dq graph on a target's integer arithmetic.

    Attributes:
        ops: every operator of the q/dq graph; "int8" where an integer kernel took it.
        levels: for the names of the operators on integers, how closely they agree with the target's kernels.
        module: the graph that runs.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        ops: tuple[LoweredOp, ...],
        levels: Mapping[str, Level],
        example_inputs: tuple[Any, ...],
        dynamic_shapes: Any,
    ) -> None:
        self.module, self.ops, self.levels = module, ops, dict(levels)
        self._example_inputs, self._dynamic_shapes = example_inputs, dynamic_shapes
        self._signature = Signature.of_graph(module, example_inputs)
        self._began = {path: buffer.clone() for path, buffer in state_of(module).items()}

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the graph without gradients.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
        """
        given = self._signature.nested(inputs, keywords)
        with torch.no_grad():
            return self.module(*given)

    def restart(self) -> None:
        """Puts the buffers that the program writes (a cache, a counter) back to what the model began with."""
        for path, buffer in state_of(self.module).items():
            buffer.copy_(self._began[path])

    def exported(self) -> torch.export.ExportedProgram:
        """Returns the graph as ATen operators on integers.

        Raises:
            LoweringError: it cannot be exported on the example inputs.
        """
        shapes = open_sizes(self.module.graph, self._example_inputs) or self._dynamic_shapes
        try:
            with torch.no_grad():
                return torch.export.export(self.module, self._example_inputs, dynamic_shapes=shapes)
        except Exception as error:
            raise LoweringError(
                f"The emulated graph cannot be exported on the example inputs ({first_line(error)}); "
                "pass inputs like those the model was exported with."
            ) from error

    def save(self, path: str | Path) -> Path:
        """Writes the exported program as a `.pt2` file and returns its path.

        Raises:
            ArtefactError: the folder does not exist, or the file cannot be written.
        """
        return write_content(path, exported_content(self.exported()))

    @property
    def nbytes(self) -> int:
        """Bytes of the integer weights and of the kernels' constants."""
        return sum(tensor.nbytes for tensor in (*self.module.parameters(), *self.module.buffers()))


def emulate(
    converted: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    kernels: str | KernelSet = "xnnpack",
    *,
    dynamic_shapes: Any = None,
) -> EmulatedProgram:
    """Returns a program that computes what a target's integer kernels compute.

    Args:
        converted: the graph module that `convert_pt2e` returned; it is not changed.
        example_inputs: positional inputs, as for `torch.export.export`.
        kernels: "xnnpack", "x86", "tosa", or a set of your own or its name.
        dynamic_shapes: as for `torch.export.export`; needed to save a program of dynamic sizes.

    Raises:
        ConfigError: there is no such kernel set.
        ModelError: `converted` is no graph module.
        LoweringError: the target's passes refuse the graph.
    """
    chosen = kernel_set(kernels)
    model = require_graph_module(converted, "emulate")
    working = _working_copy(model)
    recorded = record(working.graph)
    prepared = chosen.prepare(working, example_inputs)
    levels = dict.fromkeys(prepared.integers, Level.EXACT)
    _apply(prepared, chosen.rows, levels)
    reasons = {**_reasons(prepared.module.graph), **prepared.floats}
    _apply(prepared, chosen.conversions, {})
    _finish(prepared.module)
    ops = tuple(_placed(operator, levels, reasons) for operator in recorded)
    return EmulatedProgram(prepared.module, ops, levels, example_inputs, dynamic_shapes)


def kernel_set(kernels: str | KernelSet) -> KernelSet:
    """Returns a kernel set by name ("xnnpack", "x86", "tosa" or "package.module:SET"), or the set itself.

    Raises:
        ConfigError: there is no set of that name.
    """
    if isinstance(kernels, KernelSet):
        return kernels
    try:
        found = pkgutil.resolve_name(_BUILT_IN.get(kernels, kernels))
    except (ImportError, AttributeError, ValueError):
        found = None
    if not isinstance(found, KernelSet):
        raise ConfigError(
            f"There are no kernels '{kernels}' to emulate; choose one of {list(_BUILT_IN)}, the name "
            "'package.module:SET' of a KernelSet, or pass a KernelSet."
        )
    return found


def _working_copy(model: fx.GraphModule) -> fx.GraphModule:
    working = starting(model)
    erase_dead_code(working.graph)
    return working


def _apply(prepared: Prepared, rows: tuple[Row, ...], levels: dict[str, Level]) -> None:
    rules = [_noted(rule, row.level, prepared.floats, levels) for row in rows for rule in row.rules]
    apply(prepared.module.graph, rules)


def _noted(rule: Rule, level: Level, floats: Mapping[str, str], levels: dict[str, Level]) -> Rule:
    """Returns a rule that leaves alone what the target keeps float and notes the level of what it takes."""

    def rewrite(match: Match) -> fx.Node | str:
        operators = frozenset().union(*(origins(node) for node in match.nodes))
        kept = next((floats[node.name] for node in match.nodes if node.name in floats), None)
        found = kept or rule.rewrite(match)
        if isinstance(found, fx.Node):
            levels.update(dict.fromkeys(operators, level))
        return found

    return Rule(rule.pattern, rewrite)


def _reasons(graph: fx.Graph) -> dict[str, str]:
    """Returns why operators were not taken; a rule's reason stands at the quantize node behind the operator."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        behind = (REASON.get(user) for user in node.users)
        reason = REASON.get(node) or next(filter(None, behind), None)
        found.update(dict.fromkeys(origins(node), reason) if reason else {})
    return found


def _placed(operator: LoweredOp, levels: Mapping[str, Level], reasons: Mapping[str, str]) -> LoweredOp:
    on_integers = operator.node in levels
    reason = "" if on_integers else operator.reason or reasons.get(operator.node) or _NO_KERNEL
    placement = "int8" if on_integers else "float"
    return LoweredOp(operator.node, operator.target, operator.module_path, placement, reason)


def _finish(module: fx.GraphModule) -> None:
    erase_dead_code(module.graph)
    module.graph.lint()
    module.delete_all_unused_submodules()
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    own = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    for name in own:
        if name not in read:
            delattr(module, name)
    module.recompile()
