"""Which nodes ExecuTorch hands to XNNPACK: its own partition configs, with the integer kernels it withholds.

Before: an edge program. After: the same program with every node tagged that XNNPACK runs. The stock configs
allow about twenty elementwise operators in float only, although the runtime in the same wheel has integer
kernels for them; the subclasses here say so. Nodes that legalization marked stay float or portable.
"""

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import networkx
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.infra.pass_base import PassResult

from quantplug.core.graph.facts import operator_name
from quantplug.core.graph.operators import schema_names
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.lowering.xnnpack import batches
from quantplug.lowering.xnnpack.legalize import Legalized
from quantplug.lowering.xnnpack.placement import origins

# Stock configs that allow float only, of operators with an integer kernel (each tried in the runtime).
_INTEGER_TOO = (
    "AbsConfig", "CeilConfig", "ConstantPadConfig", "CosConfig", "DivConfig", "ExpConfig", "FloorConfig",
    "GeluConfig", "HardswishConfig", "LeakyReLUConfig", "LogConfig", "MaximumConfig", "MinimumConfig", "NegConfig",
    "PowConfig", "ReciprocalSquareRootConfig", "SigmoidConfig", "SinConfig", "SquareRootConfig", "TanhConfig",
    "UpsampleBilinear2dConfig",
)  # fmt: skip
# Stock configs whose kernels take output bounds, so that a relu or hardtanh behind them is fused.
_BOUNDED = ("AddConfig", "SubConfig", "MulConfig")
_BOUNDS = ["relu.default", "hardtanh.default"]
# Operators whose delegates hold their weights.
_WITH_WEIGHTS = (
    *("aten::convolution", "aten::linear", "aten::addmm", "aten::mm", "aten::prelu", "aten::_prelu_kernel"),
    *("aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_no_training"),
)
# Copies that only export needs.
_COPIES = {"aten::clone", "dim_order_ops::_clone_dim_order"}
# What portable kernels compute as well where there are few numbers.
_LIGHT = schema_names(
    ("add", "sub", "mul", "div", "abs", "neg", "clamp", "view_copy", "unsqueeze_copy", "squeeze_copy")
)
_FEW = 2**18
_GEMM_CONFIGS = ("ConvolutionConfig", "LinearConfig", "AddmmConfig", "MMConfig")


def partitioner(graph: fx.Graph, legal: Legalized) -> Any:
    """Returns an XNNPACK partitioner for the edge program of a legalized q/dq graph.

    Args:
        graph: the legalized graph; edge nodes are traced back to it.
        legal: which of its operators must not be paired with integer neighbours or not be taken at all.
    """
    from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
    from executorch.backends.xnnpack.partition.config.generic_node_configs import EluConfig
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from torch.fx.passes.infra.partitioner import Partition

    stock = [*ALL_PARTITIONER_CONFIGS]
    stock += [EluConfig] if EluConfig not in stock else []  # its kernel is in the runtime, the list omits it
    stock += [batches.config()]

    class InStages(XnnpackPartitioner):
        def generate_partitions(self, ep: Any) -> list[Any]:
            every = self.get_matched_nodes_from_configs(ep)
            whole, fewer = (in_stages(ep.graph, each) for each in (every, worth_a_delegate(ep.graph, every)))
            kept = filter(None, map(without_mere_copies, fewer if len(fewer) < len(whole) else whole))
            return [Partition(id=index, nodes=stage) for index, stage in enumerate(kept)]

    return InStages(configs=[_guarded(config, graph, legal) for config in stock])


def without_mere_copies(stage: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns a partition without copies of what comes from outside that go outside.

    ExecuTorch drops copies in delegates, and refuses one that returns what it was given.

    Args:
        stage: nodes of an edge program in one delegate.
    """
    inside = dict.fromkeys(sorted(stage))
    for node in sorted(stage):
        is_copy = operator_name(node) in _COPIES and node.all_input_nodes[0] not in inside
        if is_copy and any(user not in inside for user in node.users):
            del inside[node]
    return list(inside)


def worth_a_delegate(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]]) -> list[Sequence[fx.Node]]:
    """Returns groups without sums, products and views of few numbers that stand between operators of none.

    Each would cut the delegate around it into two, as the scales of a cache in integers do.

    Args:
        graph: an edge program's.
        groups: what has to run in one delegate.
    """
    inside = {node for group in groups for node in group}
    light = {group[0] for group in groups if len(group) == 1 and _is_light(group[0])}
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        outside = (source for source in node.all_input_nodes if source.op == "call_function" and source not in inside)
        if node in light and (next(outside, None) is not None or not behind.isdisjoint(node.all_input_nodes)):
            behind.add(node)
    for node in reversed(graph.nodes):
        if node in behind and all(user.op == "call_function" and user not in inside for user in node.users):
            inside.remove(node)
    return [group for group in groups if group[0] in inside]


def _is_light(node: fx.Node) -> bool:
    return operator_name(node) in _LIGHT and statically_known_true(node.meta["val"].numel() <= _FEW)


def in_stages(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """Returns groups of nodes joined to partitions none of which reads its own results by way of others.

    The stage of a group is how often the longest way to it changes between groups and nodes of none; what is in one
    stage runs together. Counted from the end there may be fewer of them: what a mask is added to need not run before
    the mask is computed. torch's partitioner joins some groups that depend on each other both ways.

    Args:
        graph: an edge program's.
        groups: what has to run in one delegate; they do not depend on each other both ways.
    """
    units, inside = _units(graph, groups), {group[0] for group in groups}
    stages = (_stages(each, inside) for each in (units, units.reverse(copy=False)))
    stage = min(stages, key=lambda each: len({each[group[0]] for group in groups}))
    joined: dict[int, list[fx.Node]] = {}
    for group in groups:
        joined.setdefault(stage[group[0]], []).extend(group)
    return list(joined.values())


def _stages(units: Any, inside: Container[fx.Node]) -> dict[fx.Node, int]:
    """Returns for each unit how often the longest way to it changes between groups and nodes of none."""
    stage: dict[fx.Node, int] = {}
    for unit in networkx.topological_sort(units):
        before = units.predecessors(unit)
        stage[unit] = max((stage[one] + ((one in inside) != (unit in inside)) for one in before), default=0)
    return stage


def _units(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]]) -> Any:
    """Returns which groups and operators of none read each other, a group by its first node.

    Constants are no results: each delegate has its own, though one of them counts the constant's node among its own.
    """
    unit = {node: group[0] for group in groups for node in group}
    reads = networkx.DiGraph()
    reads.add_nodes_from(group[0] for group in groups)
    for node in graph.nodes:
        into = unit.get(node, node)
        sources = (unit.get(source, source) for source in node.all_input_nodes if source.op != "placeholder")
        reads.add_edges_from((source, into) for source in sources if source is not into)
    return reads


def keeping_whole(partitioners: Sequence[Any]) -> list[Any]:
    """Returns partitioners each of which keeps whole what any of them wants whole.

    ExecuTorch decomposes the graph once for each, and there all that the others want: a second one would take
    linear layers and poolings away from XNNPACK.
    """
    from executorch.exir.backend.partitioner import Partitioner, PartitionResult

    class KeepingWhole(Partitioner):
        def __init__(self, own: Any) -> None:
            super().__init__()
            self.own = own

        def ops_to_not_decompose(self, program: Any) -> tuple[list[Any], Callable[[fx.Node], bool]]:
            wanted = [one.ops_to_not_decompose(program) for one in partitioners]
            return [target for targets, _ in wanted for target in targets], partial(_is_wanted, wanted)

        def partition(self, program: Any) -> PartitionResult:
            return self.own.partition(program)

    return [KeepingWhole(one) for one in partitioners] if len(partitioners) > 1 else list(partitioners)


def _is_wanted(wanted: Sequence[tuple[Sequence[Any], Callable[[fx.Node], bool] | None]], node: fx.Node) -> bool:
    return any(node.target in targets and (holds is None or holds(node)) for targets, holds in wanted)


def _guarded(stock: Any, graph: fx.Graph, legal: Legalized) -> type:
    """Returns a subclass of a stock config that knows the marked nodes and the integer kernels."""
    from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType

    def check_constraints(self: Any, node: fx.Node, ep: Any) -> bool:
        names = origins(node, graph)
        if self.target_name == batches.NAME:
            return bool(stock.check_constraints(self, node, ep))  # nothing else has a kernel for it
        if names & legal.portable.keys() or _weighs_by_state(node, ep):
            return False
        if _is_weight_only(node, names, legal) or _has_kernel(self, node, ep):
            return True
        return bool(stock.check_constraints(self, node, ep))

    def get_node_and_deps(self: Any, node: fx.Node, ep: Any) -> list[fx.Node]:
        names = origins(node, graph)
        if _is_weight_only(node, names, legal):
            weight = node.all_input_nodes[1]
            return [node, weight, *weight.all_input_nodes]
        # A convolution or linear reads its precision off its own operands, and those are float already.
        if names & legal.floats.keys() and stock.__name__ not in _GEMM_CONFIGS:
            return [node]
        return list(stock.get_node_and_deps(self, node, ep))

    def precisions(self: Any) -> list[Any]:
        return [ConfigPrecisionType.FP32, ConfigPrecisionType.STATIC_QUANT]

    def initialize(self: Any, **options: Any) -> None:
        stock.__init__(self, **options)
        self.fused_acts = list(_BOUNDS)

    members: dict[str, Any] = {"check_constraints": check_constraints, "get_node_and_deps": get_node_and_deps}
    if stock.__name__ in _INTEGER_TOO:
        members["supported_precision_types"] = precisions
    if stock.__name__ in _BOUNDED:
        members["__init__"] = initialize
    return type(stock.__name__, (stock,), members)


def _weighs_by_state(node: fx.Node, ep: Any) -> bool:
    """Tells whether a weight is a buffer that the program writes: a delegate reads its weights once, into a copy."""
    written = set(ep.graph_signature.buffers_to_mutate.values())
    if not written or operator_name(node) not in _WITH_WEIGHTS:
        return False
    held = (ep.graph_signature.inputs_to_buffers.get(_given(source).name) for source in node.all_input_nodes)
    return any(buffer in written for buffer in held)


def _given(node: fx.Node) -> fx.Node:
    """Returns what a node makes another form of: the weight behind its transposition or dequantization."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _has_kernel(config: Any, node: fx.Node, ep: Any) -> bool:
    """Tells whether a kernel takes what the stock config refuses: one tensor beside itself, parts of open tensors."""
    more = {"slice_copy.Tensor": _is_plain_slice, "cat.default": _is_of_several}
    takes = more.get(config.target_name)
    return takes is not None and bool(config.check_common_constraints(node, ep)) and takes(node)


def _is_of_several(joined: Any) -> bool:
    tensors, axis = (*joined.args, 0)[:2]
    return len(tensors) > 1 and all(_has_numbers(tensor, axis) for tensor in tensors)


def _is_plain_slice(part: Any) -> bool:
    """Tells whether a slice takes neighbours whose places are known; the serializer leaves open sizes to the kernel."""
    given: tuple[Any, ...] = (*part.args, *(0, 0, None, 1)[len(part.args) - 1 :])
    source, axis, start, _, step = given
    length, count = (tensor.meta["val"].shape[axis] for tensor in (source, part))
    first = start or 0
    if step != 1 or not isinstance(first, int) or not isinstance(count, int):
        return False
    return count > 0 and _has_numbers(source, axis) and (first >= 0 or isinstance(length, int))


def _has_numbers(tensor: fx.Node, axis: int) -> bool:
    """Tells whether a tensor has as many dimensions as an axis counts, and none of size zero."""
    shape = tensor.meta["val"].shape
    return bool(-len(shape) <= axis < len(shape)) and 0 not in [size for size in shape if isinstance(size, int)]


def _is_weight_only(node: fx.Node, names: set[str], legal: Legalized) -> bool:
    return bool(names & legal.weight_only.keys()) and operator_name(node) == "aten::linear"


def copies_of_dequantized_are_dropped(edge: fx.GraphModule) -> PassResult:
    """Lets what reads a copy of a dequantized tensor read the tensor: nobody else has a name for its memory.

    `dequantize -> copy -> view`, as export writes a reshape of a turned tensor, becomes `dequantize -> view`, which
    takes integers. Tensors of the edge program are all contiguous, so that the copy says nothing there.
    """
    copies = [node for node in edge.graph.nodes if operator_name(node) in _COPIES and _says_nothing(node)]
    for node in copies:
        node.replace_all_uses_with(node.args[0])
        edge.graph.erase_node(node)
    edge.recompile()
    return PassResult(edge, bool(copies))


def views_infer_their_open_size(edge: fx.GraphModule) -> PassResult:
    """Lets a view whose one open size is computed infer it: XNNPACK reshapes by numbers.

    Products of more than three dimensions are decomposed to views whose sizes are expressions.
    """
    changed = False
    for node in edge.graph.nodes:
        if operator_name(node) != "aten::view_copy" or all(isinstance(size, int) for size in node.args[1]):
            continue
        sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
        if sizes.count(-1) <= 1 and 0 not in sizes:
            node.update_arg(1, sizes)
            changed = True
    edge.graph.eliminate_dead_code()
    edge.recompile()
    return PassResult(edge, changed)


def _says_nothing(copy: fx.Node) -> bool:
    source = copy.args[0]
    return is_dequantize(source) and source.meta["val"].dim_order() == copy.meta["val"].dim_order()
