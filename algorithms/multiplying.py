"""Multiplications that take the scales of what layers read, where no operator before them does.

Before: an exported float graph. After: the same graph, in which a value is multiplied by a constant for each channel
before the layers that read it. One multiplication serves all layers that read a value; whatever else reads the value
reads it as it was.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantplug.algorithms.changes import put_parameters
from quantplug.algorithms.channels import channels_of
from quantplug.algorithms.layers import Layer, Readers, layer_of
from quantplug.core.graph.editing import constant, replace_inputs
from quantplug.core.graph.facts import likely_sizes
from quantplug.core.graph.working_copy import over_same_tensors


@dataclass(frozen=True)
class Place:
    """Where a multiplication may stand.

    Attributes:
        value: name of the node whose value it multiplies.
        readers: names of the layers that read it.
        sizes: of the constant.
        dtype: of the constant.
    """

    value: str
    readers: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name of the multiplication, and of the parameter that it reads with `_scale` behind."""
        return f"{self.value}_smoothed"


def places_of(model: fx.GraphModule) -> list[Place]:
    """Returns where layers read values whose scales nothing takes, and could take them themselves."""
    left, parameters = channels_of(model).left, Readers(model)
    found: dict[tuple[str, tuple[int, ...]], list[Layer]] = defaultdict(list)
    for layer in filter(None, map(layer_of, model.graph.nodes)):
        objection = parameters.objection(layer.weight, layer.node, "weight")
        if layer.node.name in left and objection is None and likely_sizes(layer.input):
            found[layer.input.name, _sizes(layer)].append(layer)
    return [_place(value, sizes, layers) for (value, sizes), layers in found.items()]


def _sizes(layer: Layer) -> tuple[int, ...]:
    sizes = likely_sizes(layer.input)
    return (sizes[len(sizes) - layer.spatial - 1], *[1] * layer.spatial)


def _place(value: str, sizes: tuple[int, ...], layers: list[Layer]) -> Place:
    recorded = layers[0].input.meta["val"]
    return Place(value, tuple(layer.node.name for layer in layers), sizes, recorded.dtype)


def multiplied(model: fx.GraphModule, places: list[Place]) -> fx.GraphModule:
    """Returns the model, or where there are places a copy over the same tensors that multiplies by one there."""
    if not places:
        return model
    copied = over_same_tensors(model)
    _insert(copied, {place: torch.ones(place.sizes, dtype=place.dtype) for place in places})
    return copied


def put(model: fx.GraphModule, places: Iterable[Place], changed: Mapping[str, Tensor]) -> dict[str, str]:
    """Gives a model other parameters, and those multiplications whose constants are among them.

    Args:
        model: the model that the copy was made of.
        places: where the copy multiplies.
        changed: parameters by their names in the copy.

    Returns:
        By the name of each multiplication that was inserted what it multiplies.
    """
    constants = {f"{place.name}_scale": place for place in places}
    put_parameters(model, {name: value for name, value in changed.items() if name not in constants})
    inserted = {place: changed[name] for name, place in constants.items() if name in changed}
    _insert(model, inserted)
    return {place.name: place.value for place in inserted}


def _insert(model: fx.GraphModule, scales: Mapping[Place, Tensor]) -> None:
    nodes = {node.name: node for node in model.graph.nodes}
    for place, scale in scales.items():
        value, first = nodes[place.value], nodes[place.readers[0]]
        weight = constant(first, f"{place.name}_scale", nn.Parameter(scale, requires_grad=False))
        with model.graph.inserting_before(first):
            node = model.graph.create_node("call_function", torch.ops.aten.mul.Tensor, (value, weight), name=place.name)
        node.meta = {"val": value.meta["val"], "nn_module_stack": _around(value, first)}
        for reader in place.readers:
            replace_inputs(nodes[reader], {value: node})
    model.recompile()


def _around(value: fx.Node, reader: fx.Node) -> dict[str, Any]:
    """Returns the modules that both nodes stand in, the outermost at least.

    A quantizer that finds layers by their modules would take what stands in them for a part of the layer.
    """
    inner, outer = (list(node.meta.get("nn_module_stack", {}).items()) for node in (reader, value))
    common = [one for one, other in zip(inner, outer, strict=False) if one == other]
    return dict(common or inner[:1])
