"""Observers in: an exported graph and a quantizer become a graph that can be calibrated or trained.

Before: `torch.export.export(model, inputs).module()`. After: a graph module of our own in which every
annotated tensor passes through an observer (PTQ) or a fake quantize (QAT); points of one sharing group
call the same instance. The caller's module stays as it was, whether the call succeeds or raises.

The semantics are those of torchao's `prepare_pt2e`; the time is linear in the graph, and each node is
rewired once.
"""

import warnings
from collections.abc import Mapping, Set
from typing import cast

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.core.annotation.verify import verify_annotations
from quantplug.core.batch_norms.inference import Permission, fold_batch_norms
from quantplug.core.batch_norms.training import fuse_batch_norms_qat
from quantplug.core.errors import ConfigError, ModelError, QuantplugWarning, shown
from quantplug.core.graph.constants import buffer_writes, constant_nodes
from quantplug.core.graph.control import run_in_python
from quantplug.core.graph.editing import erase_dead_code, replace_inputs
from quantplug.core.graph.facts import (
    attribute,
    compute_nodes,
    describe,
    is_observer,
    require_graph_module,
    tensor_value,
)
from quantplug.core.graph.meta import CONFLICTS, FOLDINGS, FOLDS, PHASE, SOURCE, SUBMODEL, TRAINING
from quantplug.core.graph.phases import PREPARED, phase_of
from quantplug.core.graph.sources import add_sources
from quantplug.core.graph.submodels import bind_constants, submodel_targets
from quantplug.core.graph.working_copy import collection_paused, rebuilt, working_copy
from quantplug.core.graph.written_inputs import leave_inputs_as_they_are
from quantplug.core.observers.from_specs import create_observers, defer
from quantplug.core.observers.sharing import Point, sharing_groups
from quantplug.core.peers.torch_names import OpOverload, pytree, schema_of
from quantplug.core.specs.decision import decision

# An output's observer stands for the output: it carries the handles by which debuggers find it.
OUTPUT_META = ("val", "from_node", "nn_module_stack", "stack_trace", "custom")


@torch.inference_mode(False)
def prepare_pt2e(model: fx.GraphModule, quantizer: Quantizer) -> fx.GraphModule:
    """Prepares an exported model for post-training quantization.

    Args:
        model: a graph module from `torch.export.export(...).module()`; it is not changed.
        quantizer: any quantizer of torchao's interface. If its `folds_batch_norm` is false, batch
            norms are left as they are; quantizers without that attribute fold.

    Returns:
        A graph module with observers: run it on calibration data, then convert it.

    Raises:
        ModelError: the model is no exported graph module, or is prepared or converted already.
        ConfigError: `quantizer` is none.
        AnnotationError: the quantizer's annotations cannot be carried out.
    """
    return _prepared(model, quantizer, "prepare_pt2e", is_qat=False)


@torch.inference_mode(False)
def prepare_qat_pt2e(model: fx.GraphModule, quantizer: Quantizer) -> fx.GraphModule:
    """Prepares an exported model for quantization-aware training.

    Args:
        model: a graph module from `torch.export.export(...).module()`; it is not changed, its
            parameters are copied.
        quantizer: any quantizer of torchao's interface whose specs make fake quantizes.

    Returns:
        A graph module with fake quantizes and trainable batch norms: train it, then convert it.

    Raises:
        ModelError: the model is no exported graph module, or is prepared or converted already.
        ConfigError: `quantizer` is none.
        AnnotationError: the quantizer's annotations cannot be carried out.
    """
    return _prepared(model, quantizer, "prepare_qat_pt2e", is_qat=True)


def _prepared(model: fx.GraphModule, quantizer: Quantizer, function: str, *, is_qat: bool) -> fx.GraphModule:
    _require_float_model(model, quantizer, function)
    with collection_paused():
        working = working_copy(model, own_parameters=is_qat)
        leave_inputs_as_they_are(working.graph, stacklevel=4)
        prepared = _prepare(working, quantizer, is_qat)
    _tell_if_all_float(prepared, quantizer)
    return prepared


def _require_float_model(model: fx.GraphModule, quantizer: Quantizer, function: str) -> None:
    if not callable(getattr(quantizer, "annotate", None)):
        raise ConfigError(
            f"{function} takes a quantizer, found {shown(repr(quantizer))}; pass one of torchao's interface, such as "
            "`quantplug.get_quantizer('xnnpack')`."
        )
    found = phase_of(require_graph_module(model, function))
    if found:
        raise ModelError(
            f"{function} takes an exported float model, found one that is {found} already; export it again."
        )


def _prepare(model: fx.GraphModule, quantizer: Quantizer, is_qat: bool) -> fx.GraphModule:
    """Prepares a graph module that is ours to change."""
    meta, folds = dict(model.meta), bool(getattr(quantizer, "folds_batch_norm", True))
    bind_constants(model)
    foldings = () if is_qat else tuple(fold_batch_norms(model, _permission(quantizer)))
    erase_dead_code(model.graph)
    # So that a quantizer with one declaration for both takes the pieces of training, with their batch norms.
    TRAINING.put(model, is_qat)
    model = _annotated(model, quantizer)
    sharing = verify_annotations(model)
    if is_qat:
        foldings = tuple(fuse_batch_norms_qat(model, _permission(quantizer)))
        sharing = sharing_groups(model.graph)
    observers = create_observers(sharing, is_qat, constant_nodes(model.graph) if is_qat else frozenset())
    quantizer.prepare_obs_or_fq_callback(model, observers)
    prepared = _insert(model, observers, is_qat, _prepared_submodels(model, quantizer, is_qat))
    prepared.meta |= meta
    FOLDS.put(prepared, folds)
    FOLDINGS.put(prepared, foldings)
    CONFLICTS.put(prepared, tuple(group.conflict for group in sharing.groups if group.conflict))
    PHASE.put(prepared, PREPARED)
    if not is_qat:
        return prepared
    run_in_python(prepared)
    # Batch norms have to learn their statistics while the fake quantizes learn their ranges.
    return prepared.train()


def _annotated(model: fx.GraphModule, quantizer: Quantizer) -> fx.GraphModule:
    """Lets a quantizer transform and annotate a graph whose operators say what strict export says that they were."""
    named = add_sources(model)
    transformed = require_graph_module(quantizer.transform_for_annotation(model), "annotate, after the transform,")
    quantizer.annotate(transformed)
    quantizer.validate(transformed)
    for node in named:
        SOURCE.drop(node)
    return transformed


def _tell_if_all_float(prepared: fx.GraphModule, quantizer: Quantizer) -> None:
    """Tells where a quantizer took no operator at all, unless its scopes say that everything is to stay float.

    Raises:
        ModelError: the quantizer is strict, and has no rule for any operator, or the model computes in another type.
    """
    if any(map(is_observer, prepared.modules())) or getattr(quantizer, "leaves_all_float", False):
        return
    parts = (part for part in prepared.modules() if isinstance(part, fx.GraphModule))
    nodes = [node for part in parts for node in compute_nodes(part.graph)]
    if not nodes:
        return
    other = _other_float_type(nodes)
    name, why = type(quantizer).__name__, _why_float(nodes, other)
    said = f"{name} quantizes none of the model's {len(nodes)} operators {why}."
    # Where a rule was near, its reason is the answer to what the user asked, and the program is right as it is.
    was_near = any(found.nearest for node in nodes if (found := decision(node)) is not None)
    if (other is not None or not was_near) and getattr(quantizer, "strict", False):
        raise ModelError(said)
    # Of the caller: behind this function, the two that call it and their decorator.
    warnings.warn(said, QuantplugWarning, stacklevel=5)


def _why_float(nodes: list[fx.Node], other_type: torch.dtype | None) -> str:
    """Returns what was decided about one of the operators, and what to do."""
    decided = [(node, found) for node in nodes if (found := decision(node)) is not None]
    # The first that a rule nearly took says most.
    decided.sort(key=lambda pair: not pair[1].nearest)
    why = f"{describe(decided[0][0])}: {decided[0][1].reason}" if decided else "none of them has an annotation"
    if other_type is not None:
        remedy = f"the model computes in {other_type}: call model.float(), give it float32 inputs and export it again"
    else:
        remedy = "change the model, the quantizer or its scopes"
    return f"({why}); {remedy}"


def _other_float_type(nodes: list[fx.Node]) -> torch.dtype | None:
    """Returns the type that a model computes in where no operator computes in float32, None where one does."""
    values = (value for node in nodes for value in pytree.tree_leaves(node.meta.get("val")))
    types = [value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return None if torch.float32 in types else next(iter(types), None)


def _permission(quantizer: Quantizer) -> Permission | None:
    """Returns which batch norms a quantizer's backend folds: by its declaration, all if it has none."""
    declared = getattr(quantizer, "folds_batch_norm", True)
    if callable(declared):
        return cast(Permission, declared)
    return None if declared else lambda producer, batch_norm: "the backend does not fold batch norms"


def _prepared_submodels(model: fx.GraphModule, quantizer: Quantizer, is_qat: bool) -> dict[str, fx.GraphModule]:
    submodels = {target: attribute(model, target) for target in submodel_targets(model)}
    for submodel in submodels.values():
        SUBMODEL.put(submodel, True)
    return {target: _prepare(submodel, quantizer, is_qat) for target, submodel in submodels.items()}


def _insert(
    model: fx.GraphModule,
    observers: Mapping[Point, nn.Module | None],
    is_qat: bool,
    submodels: Mapping[str, fx.GraphModule],
) -> fx.GraphModule:
    constant = set() if is_qat else constant_nodes(model.graph)
    insertion = _Insertion(model, observers, constant)
    for node in list(model.graph.nodes):
        insertion.visit(node)
    for observer in insertion.of_constants:
        defer(observer)
    return rebuilt(model, {**insertion.modules, **submodels})


class _Insertion:
    """Rewires each node of a graph once, in graph order, so that it reads observed tensors.

    Attributes:
        modules: the observers by the attribute that the graph calls them under, in order of first use.
        of_constants: those that see nothing else: they can wait for convert, a weight is the same in every batch.
    """

    def __init__(
        self, model: fx.GraphModule, observers: Mapping[Point, nn.Module | None], constant: Set[fx.Node]
    ) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.of_constants: set[nn.Module] = set()
        self._constant = constant
        self._graph = model.graph
        self._taken = set(dir(model))
        self._observers = observers
        self._writes = buffer_writes(model.graph)
        self._names: dict[int, str] = {}
        # What consumers read instead of a node: the node that observes its output.
        self._stand_in: dict[fx.Node, fx.Node] = {}
        # Observers of one tensor at some of its consumers, by what they read and which instance they are.
        self._at_edges: dict[tuple[fx.Node, int], fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Rewires a node's operands and observes its output."""
        reads = {n: self._operand(n, node) for n in node.all_input_nodes}
        if any(read is not n for n, read in reads.items()):
            replace_inputs(node, reads)
        observer = self._observers.get(node)
        if observer is not None and yields_tensor(node):
            self._stand_in[node] = self._call(observer, node, node, node.name)
            _carry(node, self._stand_in[node], OUTPUT_META)

    def _operand(self, producer: fx.Node, consumer: fx.Node) -> fx.Node:
        if (producer, consumer) in self._writes:
            return producer
        read = self._stand_in.get(producer, producer)
        observer = self._observers.get((producer, consumer))
        if observer is None:
            return read
        if read is not producer and observer is self._observers.get(producer):
            return read
        key = (read, id(observer))
        if key not in self._at_edges:
            name = f"{producer.name}_to_{consumer.name}" if read is not producer else producer.name
            self._at_edges[key] = self._call(observer, producer, read, name)
            _carry(producer, self._at_edges[key], ("val",))
        return self._at_edges[key]

    def _call(self, observer: nn.Module, producer: fx.Node, read: fx.Node, name: str) -> fx.Node:
        """Adds the node that passes a producer's tensor, as read through other observers, through an observer.

        The attribute says which tensor the observer was first used for: so a state dict can only be
        loaded where the same tensors are observed.
        """
        if id(observer) not in self._names:
            self._names[id(observer)] = self._free_name(f"activation_post_process_{name}")
            self.modules[self._names[id(observer)]] = observer
            self.of_constants.add(observer)
        if producer not in self._constant:
            self.of_constants.discard(observer)
        with self._graph.inserting_after(read):
            return self._graph.create_node("call_module", self._names[id(observer)], (read,))

    def _free_name(self, name: str) -> str:
        free, count = name, 0
        while free in self._taken or free in self.modules:
            count += 1
            free = f"{name}_{count}"
        return free


def _carry(origin: fx.Node, target: fx.Node, keys: tuple[str, ...]) -> None:
    target.meta.update({key: origin.meta[key] for key in keys if key in origin.meta})


def yields_tensor(node: fx.Node) -> bool:
    """Tells whether a node yields one tensor: as export recorded it, else as its operator's schema says."""
    if "val" in node.meta or node.op == "get_attr":
        return tensor_value(node) is not None
    if isinstance(node.target, OpOverload):
        return [str(r.type) for r in schema_of(node.target).returns] == ["Tensor"]
    return node.op == "placeholder"
