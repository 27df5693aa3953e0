"""Observers out: a calibrated or trained graph becomes the reference quantized model.

Before: a graph module from prepare, calibrated or trained. After: a graph module of its own in which
every observer is a quantize/dequantize pair, constants are stored as integers (or halves) with no float
copy beside them, and every consumer that a quantizer annotated reads a dequantize node of its own. The
prepared model stays as it was and can be calibrated further and converted again.
"""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.fx.traceback import NodeSource, NodeSourceAction
from torchao.quantization.pt2e.quantizer import is_valid_annotation

from quantplug.core.batch_norms.training import fold_batch_norms_qat
from quantplug.core.errors import CalibrationError, ConfigError, ConvertError, QuantplugError, first_line
from quantplug.core.graph.constants import constant_nodes, evaluate_constants
from quantplug.core.graph.control import run_as_operators
from quantplug.core.graph.editing import erase_dead_code, replace_inputs
from quantplug.core.graph.facts import attribute, observer_of, require_graph_module
from quantplug.core.graph.meta import PHASE
from quantplug.core.graph.phases import CONVERTED, PREPARED, phase_of
from quantplug.core.graph.submodels import lift_constants, submodel_targets
from quantplug.core.graph.working_copy import collection_paused, rebuilt, working_copy
from quantplug.core.observers import DataObserver
from quantplug.core.observers.from_specs import is_deferred, needs_data, observe_constant
from quantplug.core.observers.sharing import annotation_of
from quantplug.core.observers.together import find_ranges
from quantplug.core.observers.torchao_histogram import calculate_qparams_together
from quantplug.core.peers.torch_names import OpOverload, schema_of
from quantplug.core.pt2e.quantization import Quantization, add_dynamic, kind_of, output_dtype, static_quantization
from quantplug.core.pt2e.storage import Storage
from quantplug.core.qdq.arithmetic import integer_representation
from quantplug.core.qdq.integer_io import apply_io_dtypes
from quantplug.core.qdq.limits import enforce_limits
from quantplug.core.qdq.nodes import CAST_OP, CHOOSE_OPS, CHOOSE_ROWS, DEQUANTIZE_OPS, QUANTIZE_OPS, stored_dtype

# What a quantize or dequantize node takes over from the operator that it belongs to.
_PORTED_META = ("nn_module_stack", "stack_trace", "quantization_tag")
_PASS_NAME = "quantplug.convert"
_STAYS_SHARED = {CHOOSE_OPS[0], CHOOSE_ROWS, torch.ops.torchao.choose_qparams_affine.default}


@torch.inference_mode(False)
def convert_pt2e(
    model: fx.GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
) -> fx.GraphModule:
    """Converts a prepared model that was calibrated or trained.

    Args:
        model: what `prepare_pt2e` or `prepare_qat_pt2e` returned, ours or torchao's; it is not changed.
        use_reference_representation: whether to replace float operators between q/dq by integer arithmetic.
        fold_quantize: whether constants are stored quantized; if not, their quantize nodes stay in the graph.

    Returns:
        The reference quantized model, in evaluation mode.

    Raises:
        ConvertError: the model is not prepared, or is converted already.
        CalibrationError: observers have not seen data, saw data that was not finite, or found numbers that
            break a limit of the backend's kernels.
    """
    for name, flag in (
        ("use_reference_representation", use_reference_representation),
        ("fold_quantize", fold_quantize),
    ):
        if not isinstance(flag, bool):
            raise ConfigError(f"`{name}` of convert_pt2e takes True or False, found {flag!r}.")
    _require_prepared(model)
    with collection_paused():
        converted = _convert(model, fold_quantize).eval()
    enforce_limits(converted)
    apply_io_dtypes(converted)
    if use_reference_representation:
        integer_representation(converted)
    return converted


def _require_prepared(model: fx.GraphModule) -> None:
    found = phase_of(require_graph_module(model, "convert_pt2e"))
    if found == CONVERTED:
        raise ConvertError("convert_pt2e found a model that is converted already; use it as it is.")
    if found != PREPARED:
        raise ConvertError(
            "convert_pt2e found a graph module without observers; call `prepare_pt2e(model, quantizer)` "
            "and calibrate what it returns."
        )


def _convert(prepared: fx.GraphModule, fold: bool) -> fx.GraphModule:
    model = working_copy(prepared)
    run_as_operators(model.graph)
    fold_batch_norms_qat(model)
    regions = {target: _convert(attribute(model, target), fold) for target in submodel_targets(model)}
    _Conversion(model, fold).run()
    regions = lift_constants(model, regions)
    erase_dead_code(model.graph)
    converted = rebuilt({**_used_attributes(model), **regions}, model.graph, prepared)
    PHASE.put(converted, CONVERTED)
    return converted


def _used_attributes(model: fx.GraphModule) -> dict[str, Any]:
    used = {str(n.target) for n in model.graph.nodes if n.op in ("get_attr", "call_module")}
    return {target: attribute(model, target) for target in used}


class _Conversion:
    """Replaces the observers of one graph, in two passes over its nodes."""

    def __init__(self, model: fx.GraphModule, fold: bool) -> None:
        self._model = model
        self._graph = model.graph
        self._fold = fold
        self._storage = Storage(model)
        self._calls = {n: found for n in model.graph.nodes if (found := observer_of(n)) is not None}
        self._values = self._observe_constants()
        observers = list(dict.fromkeys(self._calls.values()))
        find_ranges(o for o in observers if isinstance(o, DataObserver))
        self._qparams = calculate_qparams_together(observers)
        self._quantizations: dict[nn.Module, Quantization] = {}
        self._integers: dict[Any, Tensor] = {}
        # What consumers read instead of an observer's call.
        self._stand_in: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        """Replaces every call of an observer."""
        self._require_data()
        self._skip_repeated()
        for call, observer in list(self._calls.items()):
            with self._graph.inserting_before(call), _in_words(call, observer):
                self._replace(call, observer)
        for node in list(self._graph.nodes):
            if node not in self._calls:
                self._rewire(node)
        for call in reversed(self._calls):
            if not call.users:
                self._graph.erase_node(call)

    def _observe_constants(self) -> dict[fx.Node, Tensor]:
        """Lets observers of constants see them, and returns the constants that calls are given."""
        constant = constant_nodes(self._graph)
        calls = [call for call in self._calls if call in constant]
        inputs = {call.all_input_nodes[0] for call in calls}
        values = evaluate_constants([n for n in self._graph.nodes if n in constant], inputs)
        waiting = {self._calls[c] for c in calls if is_deferred(self._calls[c]) or needs_data(self._calls[c])}
        seen: set[tuple[nn.Module, int]] = set()
        for call in calls:
            observer, value = self._calls[call], values[call.all_input_nodes[0]]
            if observer in waiting and (observer, id(value)) not in seen:
                seen.add((observer, id(value)))
                _observe(call, observer, value)
        return {call: values[call.all_input_nodes[0]] for call in calls}

    def _require_data(self) -> None:
        missing = [
            f"'{call.target}' (of '{_origin(call).name}')"
            for call, observer in self._calls.items()
            if kind_of(observer) in ("static", "own") and needs_data(observer)
        ]
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise CalibrationError(
                f"{len(missing)} observers have seen no data: {shown}; run the prepared model on calibration "
                "data before convert_pt2e."
            )

    def _skip_repeated(self) -> None:
        """Takes out observers of tensors that are quantized so already: the second pair would change nothing.

        They stand between two quantizers whose specs differ in words only, or came to the same numbers.
        """
        for call, observer in list(self._calls.items()):
            read = call.all_input_nodes[0]
            if read in self._calls and self._quantize_alike((read, self._calls[read]), (call, observer)):
                call.replace_all_uses_with(read)
                self._graph.erase_node(call)
                del self._calls[call]

    def _quantize_alike(self, *calls: tuple[fx.Node, nn.Module]) -> bool:
        if any(kind_of(observer) != "static" for _, observer in calls):
            return False
        one, other = (self._quantization(call, observer) for call, observer in calls)
        return one.equals(other)

    def _replace(self, call: fx.Node, observer: nn.Module) -> None:
        kind = kind_of(observer)
        if kind == "nothing":
            self._stand_in[call] = self._read(call)
        elif kind == "own":
            self._let_convert(call, observer)
        elif kind == "half":
            self._stand_in[call] = self._add_casts(call, observer)
        elif kind == "dynamic":
            self._stand_in[call] = self._add_dynamic(call, observer)
        else:
            self._stand_in[call] = self._add_static(call, observer)

    def _read(self, call: fx.Node) -> fx.Node:
        """Returns the node whose tensor a call observes, in the converted graph."""
        observed = call.all_input_nodes[0]
        return self._stand_in.get(observed, observed)

    def _add_static(self, call: fx.Node, observer: nn.Module) -> fx.Node:
        found = self._quantization(call, observer)
        source = self._read(call)
        quantize, dequantize = found.operators
        numbers = [self._number(n, f"{_origin(call).name}_{s}") for n, s in self._numbers(found)]
        tail = (*numbers, *found.tail)
        if self._fold and call in self._values:
            path = self._storage.keep_quantized(self._values[call], found, _origin(call).name)
            quantized = self._graph.create_node("get_attr", path)
        else:
            quantized = self._graph.call_function(quantize, (self._single(source, call), *tail))
        result = self._graph.call_function(dequantize, (quantized, *tail), output_dtype(call))
        self._describe(call, quantized, result)
        return result

    @staticmethod
    def _numbers(found: Quantization) -> tuple[tuple[Any, str], tuple[Any, str]]:
        return (found.scale, "scale"), (found.zero_point, "zero_point")

    def _quantization(self, call: fx.Node, observer: nn.Module) -> Quantization:
        if observer not in self._quantizations:
            where = f"'{_origin(call).name}' ({call.target})"
            with _in_words(call, observer):
                self._quantizations[observer] = static_quantization(observer, where, self._qparams.get(observer))
        return self._quantizations[observer]

    def _number(self, number: Any, name: str) -> Any:
        if not isinstance(number, Tensor):
            return number
        return self._graph.create_node("get_attr", self._storage.keep(number, name))

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
        self._describe(call, quantized, result)
        return result

    def _add_casts(self, call: fx.Node, observer: Any) -> fx.Node:
        if self._fold and call in self._values:
            path = self._storage.keep_cast(self._values[call], observer.dtype, _origin(call).name)
            half = self._graph.create_node("get_attr", path)
        else:
            half = self._graph.call_function(CAST_OP, (self._read(call), observer.dtype))
        value = call.meta.get("val")
        back = value.dtype if isinstance(value, Tensor) else torch.float32
        if isinstance(value, Tensor):  # a submodel's halves become its inputs, which hold nothing
            half.meta["val"] = self._integer_value(value, observer.dtype)
        result = self._graph.call_function(CAST_OP, (half, back))
        self._describe(call, half, result)
        return result

    def _let_convert(self, call: fx.Node, observer: Any) -> None:
        """Lets an observer that knows its own operators (torchao's affine ones) replace its call."""
        source, name = self._read(call), _origin(call).name
        call.args = (source,)
        before = set(source.users)
        observer.convert(self._model, call)
        del self._calls[call]
        added = [n for n in source.users if n not in before and n.target in QUANTIZE_OPS]
        if self._fold and call in self._values and added:
            self._fold_affine(added[0], self._values[call], name)

    def _fold_affine(self, quantize: fx.Node, value: Tensor, name: str) -> None:
        args = map_arg(quantize.args[1:], lambda n: attribute(self._model, str(n.target)))
        with torch.no_grad():
            stored = quantize.target(value, *args)  # type: ignore[operator]
        with self._graph.inserting_before(quantize):
            quantized = self._graph.create_node("get_attr", self._storage.keep(stored, f"{name}_quantized"))
        quantize.replace_all_uses_with(quantized)
        self._graph.erase_node(quantize)

    def _describe(self, call: fx.Node, quantized: fx.Node, dequantized: fx.Node) -> None:
        """Carries the tensor's value and its debug handles over to the nodes that replace an observer."""
        source = _source_of(call)
        value = call.meta.get("val")
        for node in (quantized, dequantized):
            node.meta["from_node"] = [source]
            if "custom" in call.meta:
                node.meta["custom"] = call.meta["custom"]
        if isinstance(value, Tensor):
            dequantized.meta["val"] = value
            if quantized.op == "call_function":
                quantized.meta["val"] = self._integer_value(value, stored_dtype(quantized))
        producer = call.all_input_nodes[0]
        annotation = annotation_of(producer)
        # What holds a stored constant stands for the constant itself.
        if quantized.op == "get_attr" or (annotation is not None and annotation.output_qspec is not None):
            _port(producer, quantized)

    def _integer_value(self, value: Tensor, dtype: Any) -> Tensor:
        """Returns the recorded value of a quantize node; alike tensors share one, for the time it takes."""
        if not all(isinstance(size, int) for size in value.shape):
            return value.to(dtype)
        key = (tuple(value.shape), value.stride(), value.device, dtype)
        if key not in self._integers:
            self._integers[key] = value.to(dtype)
        return self._integers[key]

    def _rewire(self, node: fx.Node) -> None:
        """Makes a node read what stands for the observers' calls: its own dequantize nodes if annotated."""
        read = [n for n in node.all_input_nodes if n in self._stand_in]
        if not read:
            return
        own = is_valid_annotation(annotation_of(node))
        replace_inputs(node, {call: self._for_consumer(call, node, own) for call in read})

    def _for_consumer(self, call: fx.Node, consumer: fx.Node, own: bool) -> fx.Node:
        result = self._stand_in[call]
        if not own or result.target not in DEQUANTIZE_OPS:
            return result
        if self._is_shared(call, result):
            with self._graph.inserting_after(result):
                result = self._graph.node_copy(result)
        for node in _dynamic_chain(result):
            _port(consumer, node)
        return result

    def _is_shared(self, call: fx.Node, result: fx.Node) -> bool:
        """Tells whether partitioners need a dequantize node of a consumer's own: dynamic ones stay shared."""
        # Those that are still to be rewired, and those that read the first dequantize node already.
        readers = (u for u in chain(call.users, result.users) if not _asks_for_size(u))
        return len(list(islice(readers, 2))) > 1 and _STAYS_SHARED.isdisjoint(n.target for n in _dynamic_chain(result))


@contextmanager
def _in_words(call: fx.Node, observer: nn.Module) -> Iterator[None]:
    """Says of which observer an error is that its own code, or a function that derives its numbers, raises."""
    try:
        yield
    except QuantplugError:
        raise
    except Exception as error:
        raise ConvertError(
            f"The {type(observer).__name__} '{call.target}' of '{_origin(call).name}' gives no quantization "
            f"({first_line(error)}); change its spec or its observer."
        ) from error


def _observe(call: fx.Node, observer: nn.Module, value: Tensor) -> None:
    try:
        observe_constant(observer, value)
    except (ArithmeticError, AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"The observer '{call.target}' cannot observe the constant '{_origin(call).name}' of shape "
            f"{tuple(value.shape)} and {value.dtype}: {' '.join(str(error).split())}; annotate it with another one."
        ) from error


def _origin(call: fx.Node) -> fx.Node:
    """Returns the node whose tensor an observer's call sees, through other observers."""
    node = call.all_input_nodes[0]
    while observer_of(node) is not None:
        node = node.all_input_nodes[0]
    return node


def _source_of(call: fx.Node) -> NodeSource:
    """Returns where the nodes that replace a call come from.

    `NodeSource(call)` would copy the call's whole history, which takes longer than the conversion.
    """
    source = NodeSource(None, _PASS_NAME, NodeSourceAction.CREATE)
    source.node_info = NodeSource.NodeInfo(call.name, str(call.target), id(call.graph))
    source.from_node = list(call.meta.get("from_node", ()))
    return source


def _port(origin: fx.Node, target: fx.Node) -> None:
    target.meta.update({key: origin.meta[key] for key in _PORTED_META if key in origin.meta})


def _dynamic_chain(dequantize: fx.Node) -> Iterator[fx.Node]:
    """Yields a dequantize node and, if its parameters are chosen at run time, what it was chosen by."""
    yield dequantize
    quantize = dequantize.all_input_nodes[0]
    chosen = [n.all_input_nodes[0] for n in quantize.all_input_nodes[1:] if n.target is operator.getitem]
    if chosen and chosen[0].target in CHOOSE_OPS:
        yield from (quantize, chosen[0])


def _asks_for_size(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).name in (
        "aten::sym_size",
        "aten::sym_numel",
    )
