"""What takes the place of an observer's call: quantize and dequantize nodes, casts, or its own operators.

Before: a graph whose observers have found their numbers. After: the same graph with a pair behind each call, constants
stored as integers or halves, and the calls themselves still in it for those that read them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantplug.core.graph.facts import held_tensor
from quantplug.core.pt2e.metadata import Metadata
from quantplug.core.pt2e.numbers import Numbers
from quantplug.core.pt2e.observed import Calls, in_words, origin
from quantplug.core.pt2e.quantization import add_dynamic, kind_of, output_dtype
from quantplug.core.pt2e.storage import Storage
from quantplug.core.qdq.by_rows import computed_by_rows
from quantplug.core.qdq.nodes import CAST_OP, QUANTIZE_OPS


def write_pairs(
    model: fx.GraphModule, observers: Calls, numbers: Numbers, constants: Mapping[fx.Node, Tensor]
) -> dict[fx.Node, fx.Node]:
    """Writes what takes the place of observers, each beside its call.

    Args:
        model: the graph module.
        observers: by the nodes that call them, in graph order.
        numbers: what they have found.
        constants: by call, the tensors that are to be stored quantized.

    Returns:
        By call what consumers are to read instead; calls of observers that replaced themselves are gone.
    """
    pairs = _Pairs(model, numbers, constants)
    for call, observer in observers.items():
        with model.graph.inserting_before(call), in_words(call, observer):
            pairs.replace(call, observer)
    return pairs.stand_in


class _Pairs:
    """Writes the nodes of one graph, call by call.

    Attributes:
        stand_in: by call what consumers read instead.
    """

    def __init__(self, model: fx.GraphModule, numbers: Numbers, constants: Mapping[fx.Node, Tensor]) -> None:
        self.stand_in: dict[fx.Node, fx.Node] = {}
        self._model = model
        self._graph = model.graph
        self._numbers = numbers
        self._constants = constants
        self._storage = Storage(model)
        self._metadata = Metadata()

    def replace(self, call: fx.Node, observer: nn.Module) -> None:
        """Writes what takes the place of a call, at the insertion point."""
        kind = kind_of(observer)
        if kind == "nothing":
            self.stand_in[call] = self._read(call)
        elif kind == "own":
            self._let_convert(call, observer)
        elif kind == "cast":
            self.stand_in[call] = self._add_casts(call, observer)
        elif kind == "dynamic":
            self.stand_in[call] = self._add_dynamic(call, observer)
        else:
            self.stand_in[call] = self._add_static(call, observer)

    def _read(self, call: fx.Node) -> fx.Node:
        """Returns the node whose tensor a call observes, in the converted graph."""
        observed = call.all_input_nodes[0]
        return self.stand_in.get(observed, observed)

    def _add_static(self, call: fx.Node, observer: nn.Module) -> fx.Node:
        found = self._numbers.quantization(call, observer)
        source, name = self._read(call), origin(call).name
        quantize, dequantize = found.operators
        scale, zero_point = (
            self._number(found.scale, f"{name}_scale"),
            self._number(found.zero_point, f"{name}_zero_point"),
        )
        tail = (scale, zero_point, *found.tail)
        if call in self._constants:
            quantized = self._held(self._storage.keep_quantized(self._constants[call], found, name))
        else:
            quantized = self._graph.call_function(quantize, (self._single(source, call), *tail))
        result = self._graph.call_function(dequantize, (quantized, *tail), output_dtype(call))
        self._metadata.describe(call, quantized, result)
        return result

    def _number(self, number: Any, name: str) -> Any:
        return self._held(self._storage.keep(number, name)) if isinstance(number, Tensor) else number

    def _held(self, path: str) -> fx.Node:
        return self._graph.create_node("get_attr", path)

    def _single(self, source: fx.Node, call: fx.Node) -> fx.Node:
        """Casts a float64 tensor, which the quantize operators do not take."""
        value = call.meta.get("val")
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            single = self._graph.call_function(torch.ops.aten.to.dtype, (source, torch.float32))
            single.meta["val"] = value.to(torch.float32)
            return single
        return source

    def _add_dynamic(self, call: fx.Node, observer: nn.Module) -> fx.Node:
        result = add_dynamic(self._graph, self._single(self._read(call), call), observer)
        quantized = result.all_input_nodes[0]
        self._metadata.describe(call, quantized, result)
        return result

    def _add_casts(self, call: fx.Node, observer: Any) -> fx.Node:
        if call in self._constants:
            cast = self._held(self._storage.keep_cast(self._constants[call], observer.dtype, origin(call).name))
        else:
            cast = self._graph.call_function(CAST_OP, (self._read(call), observer.dtype))
        value = call.meta.get("val")
        back = value.dtype if isinstance(value, Tensor) else torch.float32
        if isinstance(value, Tensor):  # in a submodel it becomes an input, which holds no tensor
            cast.meta["val"] = self._metadata.stored(value, observer.dtype)
        result = self._graph.call_function(CAST_OP, (cast, back))
        self._metadata.describe(call, cast, result)
        return result

    def _let_convert(self, call: fx.Node, observer: Any) -> None:
        """Lets an observer that knows its own operators (torchao's affine ones) replace its call."""
        source, name = self._read(call), origin(call).name
        call.args = (source,)
        before = set(source.users)
        observer.convert(self._model, call)
        added = [n for n in source.users if n not in before and n.target in QUANTIZE_OPS]
        if call in self._constants and added:
            self._store(added[0], self._constants[call], name)

    def _store(self, quantize: fx.Node, value: Tensor, name: str) -> None:
        """Puts the integers of a constant in the place of the node that quantizes it."""
        with torch.no_grad():
            stored = computed_by_rows(quantize, lambda n: value if n is quantize.args[0] else held_tensor(n))
        # A copy, made when the float intermediates are gone, stands in their place and not behind it: between integers
        # that stay they would leave holes in the heap, half as large as the weights in sum.
        stored = stored.clone()
        with self._graph.inserting_before(quantize):
            quantized = self._held(self._storage.keep_made(value, stored, f"{name}_quantized"))
        quantize.replace_all_uses_with(quantized)
        self._graph.erase_node(quantize)
