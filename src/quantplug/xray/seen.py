"""The forms of a quantized model side by side: what each layer yields in them, and how long it takes.

Before: a float graph, a q/dq graph and batches. After: for each form the energies of errors, by layer; for the artefact
times. A form that cannot be made is told of, and the others are looked into.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import LoweringError
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.integer_io import dequantized_outputs, quantized_inputs
from quantplug.core.report.layer_errors import energy, error_energy
from quantplug.core.report.layers import pieces
from quantplug.core.report.runs import FloatRuns, OwnRun, Run, as_quantized
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.between import Inside, LayersAlone, contiguous, cut_apart, with_values
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.timing import KernelTime, Taken, timed
from quantplug.quantizers.framework.backend import Backend


@dataclass
class FormNoise:
    """Energies of one form: the float value's, and the error's.

    Attributes:
        own: by layer, where layers read float values.
        accumulated: by layer, in the model.
        output: of what the model returns.
    """

    own: dict[str, list[float]] = field(default_factory=dict)
    accumulated: dict[str, list[float]] = field(default_factory=dict)
    output: list[float] = field(default_factory=lambda: [0.0, 0.0])


class Seen:
    """Values of the q/dq graph, its emulation and its program, beside float ones.

    Args:
        floats: the float graph.
        converted: the q/dq graph, all inputs by position.
        batches: positional inputs of the float graph.

    Attributes:
        noise: by form.
        notes: what was not looked into, and why; what figures are from.
        ops: where the artefact runs each operator, by its name.
        kernel_times: how long each of its kernels takes, where the runtime tells.
        times: how long layers take as programs of their own, by name.
        time: how long a call takes.
    """

    def __init__(self, floats: fx.GraphModule, converted: fx.GraphModule, batches: Sequence[tuple[Any, ...]]) -> None:
        self.noise: dict[str, FormNoise] = {}
        self.notes: list[str] = []
        self.ops: Mapping[str, LoweredOp] = {}
        self.kernel_times: tuple[KernelTime, ...] = ()
        self.times: dict[str, Taken] = {}
        self.time: Taken | None = None
        self._floats, self._converted, self._batches = as_quantized(floats, converted), converted, batches
        self._values, self._apart = with_values(converted), cut_apart(converted)
        self._inputs = [node.name for node in converted.graph.find_nodes(op="placeholder")]
        self._pieces = pieces(converted.graph)
        self._ends = {piece.root.name: piece.end.name for piece in self._pieces}

    def reference(self) -> None:
        """Looks at the q/dq graph."""
        self._add("reference", lambda graph, inputs: Run(graph))

    def look(self, backend: Backend, program: Program | None, times: bool | None) -> None:
        """Looks at all forms.

        Args:
            backend: what lowers and emulates.
            program: the artefact, None to lower it here.
            times: as for `inspect`.
        """
        self.reference()
        if backend.kernels is not None:
            self._add("emulation", backend.emulate)
        first = quantized_inputs(self._converted, self._batches[0])
        try:
            made = program if program is not None else backend.lower(self._converted, first)
        except LoweringError as error:  # a graph that cannot be lowered is one to look into
            self.notes.append(f"There is no artefact to look into: {error}")
            return
        self.ops = {op.node: op for op in made.ops}
        if made.has_kernels:
            self._add("program", backend.lower, made)
        if times is not False and made.has_kernels:
            self._time(backend, made, first, bool(times))

    def _add(self, form: str, make: Callable[..., Any], plain: Program | None = None) -> None:
        try:
            self.noise[form] = self._of_form(make, plain)
        except LoweringError as error:
            self.notes.append(f"The {form} is not looked into: {error}")

    def _of_form(self, make: Callable[..., Any], plain: Program | None) -> FormNoise:
        found, runs = FormNoise(), dict[str, Any]()
        for batch in self._batches:
            floats = FloatRuns(self._floats, batch)
            given = quantized_inputs(self._converted, batch)
            known = self._known(floats, given)
            values = tuple(contiguous(known[name]) for name in self._apart.values)
            if not runs:
                runs = {"in": make(self._values.model, given), "own": make(self._apart.model, values)}
            with torch.no_grad():
                inside, own = _fresh(runs["in"])(*given), _fresh(runs["own"])(*values)
            outputs = inside[: len(inside) - len(self._values.layers)]
            if plain is not None and batch is self._batches[0]:
                self._tell_of_agreement(outputs, _leaves(_fresh(plain)(*given)))
            self._sum(found, self._values, inside[len(outputs) :], floats, found.accumulated)
            self._sum(found, self._apart, own, floats, found.own)
            returned = _leaves(dequantized_outputs(self._converted, list(outputs)))
            _sum_outputs(found, returned, _leaves(floats.result()))
        return found

    def _known(self, floats: FloatRuns, given: tuple[Any, ...]) -> dict[str, Any]:
        """Returns what layers read by the names of nodes; what the float model lacks is computed of what it has."""
        run = OwnRun(self._converted, self._pieces, floats.values)
        passed = {node.name: value for node, value in run.values(given).items()}
        return {**passed, **dict(zip(self._inputs, _leaves(given), strict=True))}

    def _sum(
        self, found: FormNoise, inside: Inside, values: Sequence[Any], floats: FloatRuns, into: dict[str, list[float]]
    ) -> None:
        for layer, value in zip(inside.layers, values, strict=True):
            wanted = floats.values.get(self._ends[layer])
            if isinstance(wanted, Tensor) and wanted.shape == value.shape:
                sums = into.setdefault(layer, [0.0, 0.0])
                sums[0] += energy(wanted)
                sums[1] += error_energy(value, wanted)

    def _tell_of_agreement(self, found: Sequence[Any], wanted: Sequence[Any]) -> None:
        pairs = [pair for pair in zip(found, wanted, strict=True) if isinstance(pair[1], Tensor)]
        if all(torch.equal(*pair) for pair in pairs):
            self.notes.append(
                "The program that also returns the values in between gives the same results, bit for bit."
            )
            return
        least = min(sqnr(one.double(), other.double()) for one, other in pairs)
        self.notes.append(
            f"The program that also returns the values in between is fused otherwise: its results are {least:.1f} dB "
            "from the artefact's."
        )

    def _time(self, backend: Backend, program: Program, inputs: tuple[Any, ...], each: bool) -> None:
        self.time = timed(lambda: program(*inputs))
        self.kernel_times = program.kernel_times(*inputs)
        if self.kernel_times:
            self.notes.append(
                "Times are quartiles of kernels that ran one by one; a call of the whole also spends time between them."
            )
        elif each:
            self._time_alone(backend)
        else:
            self.notes.append(
                "Layers are not timed: the runtime tells no times. `times=True` (`--times`) times each as a program."
            )

    def _time_alone(self, backend: Backend) -> None:
        given = quantized_inputs(self._converted, self._batches[0])
        values = self._known(FloatRuns(self._floats, self._batches[0]), given)
        alone = LayersAlone(self._converted, values, backend.lower)
        for layer in self._apart.layers:
            self._time_layer(alone, layer)
        self.notes.append(
            "Times are of each layer as a program of its own, less that of one that only rounds its inputs; the bounds "
            "hold what is not known of it."
        )

    def _time_layer(self, alone: LayersAlone, layer: str) -> None:
        try:
            self.times[layer] = alone.taken(layer)
        except LoweringError as error:
            self.notes.append(f"Layer '{layer}' is not timed: {error}")


def _fresh(run: Any) -> Any:
    restart: Callable[[], None] = getattr(run, "restart", lambda: None)
    restart()
    return run


def _leaves(result: Any) -> list[Any]:
    return list(pytree.tree_leaves(result))


def _sum_outputs(found: FormNoise, outputs: Sequence[Any], wanted: Sequence[Any]) -> None:
    for value, expected in zip(outputs, wanted, strict=True):
        if isinstance(expected, Tensor) and isinstance(value, Tensor) and value.is_floating_point():
            found.output[0] += energy(expected)
            found.output[1] += error_energy(value, expected)
