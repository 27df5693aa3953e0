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
from types import MappingProxyType
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
    return _copied(LazyGraphModule, model, own_parameters, {})


def over_same_tensors(model: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph module whose graph may be changed, over the same parameters, buffers and submodels."""
    return _with_meta(fx.GraphModule(model, _copied_graph(model.graph)), model)


def _copied_graph(graph: fx.Graph) -> fx.Graph:
    with warnings.catch_warnings():
        # Copying a graph's input and output structure reaches a deprecated class of torch's pytree.
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(graph)


def _copied(kind: type[fx.GraphModule], model: fx.GraphModule, own_parameters: bool, copies: Copies) -> fx.GraphModule:
    graph = _copied_graph(model.graph)
    _follow_annotations(model.graph, graph)
    written = name_memory_once(graph, model)
    attributes: dict[str, Any] = {}
    for path in used_attributes(graph):
        value = attribute(model, path)
        if isinstance(value, torch.nn.Parameter) and path in written and not own_parameters:
            value = value.detach()
        attributes[path] = _copy_value(value, own_parameters, copies)
    return _with_meta(kind(attributes, graph), model)


def rebuilt(model: fx.GraphModule, instead: Mapping[str, Any] = MappingProxyType({})) -> fx.GraphModule:
    """Returns a new module of a model's graph that holds exactly the attributes that the graph uses.

    Args:
        model: the module with the attributes, whose meta goes along.
        instead: attributes that take the place of the model's, or that it lacks.
    """
    used = {path: instead[path] if path in instead else attribute(model, path) for path in used_attributes(model.graph)}
    return _with_meta(SwitchableGraphModule(used, model.graph), model)


def used_attributes(graph: fx.Graph) -> list[str]:
    """Returns the paths of what a graph reads or calls, each once, in graph order."""
    return list(dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")))


def _with_meta(module: fx.GraphModule, origin: fx.GraphModule) -> fx.GraphModule:
    module.meta = dict(origin.meta)
    return module


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
        return _copied(SwitchableGraphModule, value, own_parameters, copies)
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
