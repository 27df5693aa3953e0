"""From a q/dq graph to an ExecuTorch program on XNNPACK's kernels.

Before: a converted `torch.fx.GraphModule`. After: a program that has been exported, partitioned,
serialized, loaded into the real runtime, run on the example inputs and compared with the q/dq graph.
"""

import contextlib
import copy
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import torch
from torch import Tensor, fx

from quantplug.core.errors import LoweringError, first_line
from quantplug.core.files.structures import without_unnamed
from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.facts import compute_nodes, operator_name, require_graph_module
from quantplug.core.graph.lazy import compiled_when_run
from quantplug.core.peers.glibc import give_back
from quantplug.core.peers.linux import let_all_go
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.calls import QuantizedCall
from quantplug.core.qdq.nodes import is_conversion, is_dequantize
from quantplug.core.specs.decision import decision
from quantplug.lowering.agreement import Sparing, agreement
from quantplug.lowering.open_sizes import open_sizes
from quantplug.lowering.placement import record
from quantplug.lowering.program import LoweredOp, refusal
from quantplug.lowering.rewrites.control import submodels_are_inlined
from quantplug.lowering.scopes import require_no_autocast
from quantplug.lowering.signature import Signature
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.starting import starting, starting_from_state, twin, write_in_place
from quantplug.lowering.xnnpack.capacity import largest_sizes, one_way_to_convolve, require_capacity, require_limits
from quantplug.lowering.xnnpack.edge import LARGE, constants_shared, lowered_edge
from quantplug.lowering.xnnpack.legalize import Legalized, legalize, read_tables_by_row, runs_alone
from quantplug.lowering.xnnpack.legalize.half import compute_in_float16, compute_in_float32
from quantplug.lowering.xnnpack.legalize.products import GEMMS
from quantplug.lowering.xnnpack.partition import (
    copies_of_dequantized_are_dropped,
    keeping_whole,
    partitioner,
    views_infer_their_open_size,
)
from quantplug.lowering.xnnpack.placement import count, delegates, place
from quantplug.lowering.xnnpack.program import XNNPACKProgram
from quantplug.lowering.xnnpack.retracing import tensors_remembered
from quantplug.lowering.xnnpack.run_time import as_kernels_choose, as_serializer_reads, scales_of_groups_as_stored
from quantplug.lowering.xnnpack.runtime import Method, check_threads, quiet
from quantplug.lowering.xnnpack.serializer.passes import idle_passes_left_out
from quantplug.lowering.xnnpack.serializer.records import recorded_kernel_calls

# Seen with ExecuTorch 1.4.
_MIXED_UP = "in float, ExecuTorch's delegates refuse it or compute it wrongly here"


def lower(
    converted: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    threads: int | None = None,
    minimum_sqnr: float | None = None,
    accepts: Callable[[fx.Node], bool] | None = None,
    partitioners: Sequence[Any] = (),
    constants: Mapping[str, Any] | None = None,
) -> XNNPACKProgram:
    """Lowers a q/dq graph to an ExecuTorch program, proved in the runtime before it is returned.

    Args:
        converted: the graph module that `convert_pt2e` returned; it is not changed.
        example_inputs: positional inputs, as for `torch.export.export`.
        dynamic_shapes: as for `torch.export.export`; None for the sizes that are dynamic in the graph itself.
        threads: threads of the runtime, None for its own number. The runtime has one pool for the
            whole process; a program with another number replaces it when it runs.
        minimum_sqnr: decibels that the program must keep of the q/dq graph on the example inputs; None for 25, or
            fewer where the graph itself changes by more when a few of its integers are one step off.
        accepts: which operators of the q/dq graph XNNPACK may take; None for all.
        partitioners: ExecuTorch partitioners of other delegates, which are offered what is left, in this order.
            What no delegate takes runs on portable kernels.
        constants: numbers, or lists of them, that further methods of the `.pte` return, by the methods' names; what
            ExecuTorch's runners ask a file for.

    Returns:
        The loaded program.

    Raises:
        ConfigError: threads is no positive number.
        ModelError: `converted` is no graph module.
        LoweringError: export, partitioning, loading, running or comparing failed; the message says which.
    """
    check_threads(threads)
    model = require_graph_module(converted, "lower")
    inputs = pytree.tree_map(lambda v: v.detach().contiguous() if isinstance(v, Tensor) else v, tuple(example_inputs))
    working = _working_copy(model)
    with quiet(), torch.no_grad(), compiled_when_run():
        # As the graph has them: the user's own may name parameters that it has no longer, as those of `*args`.
        shapes = open_sizes(model.graph, inputs) or dynamic_shapes
        require_limits(model.graph)
        require_no_autocast(working.graph, "ExecuTorch does")
        recorded = record(working.graph)
        notes, is_rounded = as_kernels_choose(working), scales_of_groups_as_stored(working)
        # Where the graph says less than the kernels do, the program is compared with what they are asked for.
        expected = _reference(working if notes or is_rounded else model, inputs)
        halves = compute_in_float16(working, expected)
        compute_in_float32(working, expected)
        tables = read_tables_by_row(working)
        legal = legalize(working, accepts)
        left = dict.fromkeys(_left_to_others(working.graph, accepts), "`accepts` leaves it to others than XNNPACK")
        legal = replace(legal, portable=left | legal.portable, notes=notes | halves | tables)
        written = as_serializer_reads(working, legal.floats.keys() | legal.portable.keys())
        others = tuple(partitioners)
        let_all_go(working)
        task = _Task(recorded, written, working, inputs, shapes, threads, expected, minimum_sqnr, others, constants)
        return _proved_or_next_best(task, legal)


def _left_to_others(graph: fx.Graph, accepts: Callable[[fx.Node], bool] | None) -> set[str]:
    """Returns the operators that are not accepted, and the conversions that no accepted operator writes or reads."""
    if accepts is None:
        return set()
    operators = {n for n in compute_nodes(graph) if not is_conversion(n)}
    accepted = {n for n in operators if accepts(n)}
    written, read = set(accepted), set(accepted)
    for node in graph.nodes:
        if node not in operators and not written.isdisjoint(node.all_input_nodes):
            written.add(node)
    for node in reversed(graph.nodes):
        if node not in operators and not read.isdisjoint(node.users):
            read.add(node)
    return {n.name for n in compute_nodes(graph) if n not in written and n not in read}


@dataclass(frozen=True)
class _Task:
    """A legalized graph, as it is serialized and as it computes what it says, and what its program has to do.

    `recorded` are the operators of the q/dq graph.
    """

    recorded: tuple[LoweredOp, ...]
    working: fx.GraphModule
    yardstick: fx.GraphModule
    inputs: tuple[Any, ...]
    dynamic_shapes: Any
    threads: int | None
    expected: Any
    minimum_sqnr: float | None
    partitioners: tuple[Any, ...]
    constants: Mapping[str, Any] | None


def _proved_or_next_best(task: _Task, legal: Legalized) -> XNNPACKProgram:
    """Returns a program that runs and agrees; kinds of operators that the runtime refuses are left float.

    The installed runtime has the last word: if the first program does not load, run or agree, the float
    operators are kept out of the delegates, where ExecuTorch's layout pass mixes up those that it decomposes;
    then elementwise operators are left float, as few kinds of them as halving finds.
    """
    try:
        return _proved(task, legal)
    except LoweringError:
        outside = dict.fromkeys(_float_operators(task.working), _MIXED_UP)
        apart = replace(legal, portable=legal.portable | outside)
        found = (_attempt(task, apart) if outside else None) or _fewest_floats(task, apart)
        if found is None:
            raise
        return found


def _fewest_floats(task: _Task, legal: Legalized) -> XNNPACKProgram | None:
    kinds = _elementwise(task.working, legal)
    found = _with_floats(task, legal, kinds) if kinds else None
    while found is not None and len(kinds) > 1:
        middle = len(kinds) // 2
        halves = ((half, _with_floats(task, legal, half)) for half in (kinds[:middle], kinds[middle:]))
        kinds, narrower = next(((half, program) for half, program in halves if program is not None), ([], None))
        found = narrower or found
    return found


def _with_floats(task: _Task, legal: Legalized, kinds: list[list[str]]) -> XNNPACKProgram | None:
    names = (name for kind in kinds for name in kind)
    floats = dict.fromkeys(names, "the installed runtime refused it as an integer kernel")
    return _attempt(task, replace(legal, floats=legal.floats | floats))


def _attempt(task: _Task, legal: Legalized) -> XNNPACKProgram | None:
    with contextlib.suppress(LoweringError):
        return _proved(task, legal)
    return None


def _float_operators(working: fx.GraphModule) -> Iterator[str]:
    """Yields the operators decided float, and those that neither read nor yield integers.

    Products with narrow weights are integer kernels between floats.
    """
    for node in compute_nodes(working.graph):
        decided = decision(node)
        is_narrow = decided is not None and decided.quantized and operator_name(node) in GEMMS
        is_integer = any(map(is_dequantize, node.all_input_nodes)) or QuantizedCall.of(node).output is not None
        is_kept = decided is None or decided.quantized
        if not (is_conversion(node) or is_narrow or (is_integer and is_kept)):
            yield node.name


def _elementwise(working: fx.GraphModule, legal: Legalized) -> list[list[str]]:
    """Returns the names of integer operators that can be left float by themselves, by kind, the rarest first."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for node in compute_nodes(working.graph):
        if not is_conversion(node) and runs_alone(node) and node.name not in legal.floats:
            kinds[operator_name(node)].append(node.name)
    return sorted(kinds.values(), key=len)


def _proved(task: _Task, legal: Legalized) -> XNNPACKProgram:
    program = _emit(task, legal)
    found = program(*task.inputs)
    if written_buffers(task.working.graph):
        program.restart()
    program.sqnr = agreement(found, task.expected, task.yardstick, task.inputs, task.minimum_sqnr)
    return program


def _reference(model: fx.GraphModule, inputs: tuple[Any, ...]) -> Any:
    try:
        return Sparing(twin(model)).run(*copy.deepcopy(inputs))
    except Exception as error:
        raise LoweringError(
            f"The q/dq graph does not run on the example inputs: {first_line(error)}; "
            "pass inputs like those it was exported with."
        ) from error


def _working_copy(model: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph module of its own graph over the same parameters, without export's guards."""
    working = submodels_are_inlined(starting(model))
    for node in list(working.graph.nodes):
        # Every pass of ExecuTorch copies the whole history of every node; a fifth of lowering went into it.
        node.meta.pop("from_node", None)
        if node.target is torch.ops.aten.copy_.default and node.args[1].op == "get_attr":
            # An exported program whose next value of a buffer is another buffer cannot be decomposed twice.
            with working.graph.inserting_before(node):
                node.update_arg(1, working.graph.call_function(torch.ops.aten.clone.default, (node.args[1],)))
            node.args[1].meta = dict(node.meta)
    spell_plainly(working.graph)
    working.recompile()
    return working


def _emit(task: _Task, legal: Legalized) -> XNNPACKProgram:
    is_large = sum(held.nbytes for held in task.working.buffers()) >= LARGE
    if is_large:
        give_back()
    file = tempfile.TemporaryFile()  # noqa: SIM115  # a large program stays in it
    facts = _written(task, legal, file)
    if is_large:
        give_back()
        return XNNPACKProgram(Method(file, task.threads), *facts)
    with file:
        file.seek(0)
        return XNNPACKProgram(Method(file.read(), task.threads), *facts)


def _written(task: _Task, legal: Legalized, file: BinaryIO) -> tuple[Any, ...]:
    """Writes a program and returns what is known of it beside its method; what it was put together from is gone."""
    import executorch.kernels.quantized  # noqa: F401  q/dq operators outside delegates need its out variants
    from executorch.backends.xnnpack.utils.configs import get_transform_passes

    graph = task.working.graph
    with recorded_kernel_calls() as calls, one_way_to_convolve(), idle_passes_left_out(), tensors_remembered():
        try:
            exported = torch.export.export(task.working, task.inputs, dynamic_shapes=task.dynamic_shapes)
            signature, structure = Signature.of_exported(exported), exported.call_spec.out_spec
            largest = largest_sizes(exported)
            _structured_for_file(exported)
            # The stock ones drop the no-op expands around every matmul.
            passes = get_transform_passes([copies_of_dequantized_are_dropped, views_infer_their_open_size])
            asked = keeping_whole([partitioner(graph, legal), *task.partitioners])
            with constants_shared(exported):
                edge = lowered_edge(exported, passes, asked, task.constants or {})
                write_in_place(edge.exported_program())
                emitted = edge.to_executorch(starting_from_state(edge.exported_program()))
        except Exception as error:
            raise refusal("XNNPACK", error) from error
    let_all_go(task.working)
    ops = place(task.recorded, task.working, edge.exported_program(), calls, legal)
    counts = count(edge.exported_program(), calls)
    require_capacity(largest, emitted.executorch_program)
    try:
        emitted.write_to_file(file)
        file.flush()
    except OSError as error:
        raise refusal("XNNPACK", error) from error
    for held in (lowered.named_data_store_output for lowered in delegates(edge.exported_program())):
        if held is not None:
            held.buffers.clear()  # torch's cache of fake tensors keeps delegates alive
    return ops, counts, signature, structure, largest


def _structured_for_file(exported: torch.export.ExportedProgram) -> None:
    """A `.pte` takes and returns tensors flat, but ExecuTorch writes their structures down beside them."""
    signature = exported.module_call_graph[0].signature
    assert signature is not None  # that of the whole program
    signature.in_spec, signature.out_spec = without_unnamed(signature.in_spec), without_unnamed(signature.out_spec)
