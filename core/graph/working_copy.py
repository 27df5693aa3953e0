"""A private copy of an exported graph module, so that nothing of the caller's is ever written to.

Before: a graph module that a caller owns. After: a second graph module with its own graph, its own
annotations and its own `Parameter` objects. Parameters share storage with the caller's unless
`own_parameters` is asked for (training writes into them); buffers are always copied, because graphs with
mutable buffers write into them when they run, and so are parameters that a graph writes, which become buffers.
"""

import copy
import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.graph.facts import attribute, is_observer
from quantplug.core.graph.lazy import LazyGraphModule
from quantplug.core.graph.memory import name_memory_once
from quantplug.core.graph.modes import SwitchableGraphModule

Copies: TypeAlias = dict[int, Any]


def working_copy(model: fx.GraphModule, own_parameters: bool = False) -> fx.GraphModule:
    """Returns a copy of a graph module that may be changed freely, submodels of control flow included.

    Tied parameters stay tied. Attributes that the graph does not use are left behind. Observers are not
    copied: they refer to each other, and whoever copies a prepared graph only reads them.

    Raises:
        ModelError: the graph refers to an attribute that the module does not have, or writes one of which another
            is a part.
    """
    attributes, graph = _copied(model, own_parameters, {})
    duplicate = LazyGraphModule(_used(attributes, graph), graph)
    duplicate.meta = dict(model.meta)
    return duplicate


def over_same_tensors(model: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph module whose graph may be changed, over the same parameters, buffers and submodels."""
    duplicate = fx.GraphModule(model, _copied_graph(model.graph))
    duplicate.meta = dict(model.meta)
    return duplicate


def _copied_graph(graph: fx.Graph) -> fx.Graph:
    with warnings.catch_warnings():
        # Copying a graph's input and output structure reaches a deprecated class of torch's pytree.
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(graph)


def _copied(model: fx.GraphModule, own_parameters: bool, copies: Copies) -> tuple[dict[str, Any], fx.Graph]:
    graph = _copied_graph(model.graph)
    _follow_annotations(model.graph, graph)
    written = name_memory_once(graph, model)
    attributes: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and node.target not in attributes:
            value = attribute(model, str(node.target))
            if isinstance(value, torch.nn.Parameter) and node.target in written and not own_parameters:
                value = value.detach()
            attributes[str(node.target)] = _copy_value(value, own_parameters, copies)
    return attributes, graph


def rebuilt(attributes: Mapping[str, Any], graph: fx.Graph, origin: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph module that holds exactly the attributes that its graph uses, with the origin's meta."""
    module = SwitchableGraphModule(_used(attributes, graph), graph)
    module.meta = dict(origin.meta)
    return module


def _used(attributes: Mapping[str, Any], graph: fx.Graph) -> dict[str, Any]:
    used = [str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")]
    return {target: attributes[target] for target in used}


def _copy_value(value: Any, own_parameters: bool, copies: Copies) -> Any:
    if id(value) not in copies:
        copies[id(value)] = _fresh(value, own_parameters, copies)
        # The memo goes by identity, so the original must not be collected and its id reused.
        copies.setdefault(-1, []).append(value)
    return copies[id(value)]


def _fresh(value: Any, own_parameters: bool, copies: Copies) -> Any:
    if isinstance(value, torch.nn.Parameter):
        data = value.detach().clone() if own_parameters else value.detach()
        return torch.nn.Parameter(data, requires_grad=value.requires_grad)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, fx.GraphModule):
        return rebuilt(*_copied(value, own_parameters, copies), value)
    if isinstance(value, torch.nn.Module) and not is_observer(value):
        return copy.deepcopy(value)
    return value


def _follow_annotations(old: fx.Graph, new: fx.Graph) -> None:
    """Points the annotations of the new graph, which still name the old graph's nodes, at its own."""
    moved = dict(zip(old.nodes, new.nodes, strict=True))
    for node in new.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if isinstance(annotation, QuantizationAnnotation):
            node.meta[Q_ANNOTATION_KEY] = _moved_annotation(annotation, moved)


def _moved_annotation(annotation: QuantizationAnnotation, moved: dict[fx.Node, fx.Node]) -> QuantizationAnnotation:
    duplicate = copy.copy(annotation)
    duplicate.input_qspec_map = {
        moved.get(node, node): _moved_spec(spec, moved) for node, spec in (annotation.input_qspec_map or {}).items()
    }
    duplicate.output_qspec = _moved_spec(annotation.output_qspec, moved)
    return duplicate


def _moved_spec(spec: Any, moved: dict[fx.Node, fx.Node]) -> Any:
    if isinstance(spec, SharedQuantizationSpec):
        return SharedQuantizationSpec(_moved_point(spec.edge_or_node, moved))
    if isinstance(spec, DerivedQuantizationSpec):
        duplicate = copy.copy(spec)
        points = [_moved_point(point, moved) for point in spec.derived_from]
        # The spec is frozen; this is the copy that nobody else has seen.
        object.__setattr__(duplicate, "derived_from", points)
        return duplicate
    return spec


def _moved_point(point: Any, moved: dict[fx.Node, fx.Node]) -> Any:
    if isinstance(point, tuple):
        return tuple(moved.get(node, node) for node in point)
    return moved.get(point, point)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Puts Python's cyclic garbage collection off.

    Building a graph makes long-lived objects, each batch of which sets off a collection that walks all
    objects of the process (torch alone has a million) and frees nothing: a third of the time of prepare.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
