"""From a q/dq graph to OpenVINO's compiler, which chooses kernels and layouts by itself.

Before: the result of `convert_pt2e`. After: an `OpenVINOProgram`. OpenVINO's front end reads graphs of torch.export
and knows the operators of `quantized_decomposed`, as the two halves of one rounding of activations: it passes
integers through a dequantize node unscaled. Constants behind such a node are therefore scaled by plain operators,
the form in which OpenVINO itself stores quantized weights.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.editing import call, constant, erase_unused, finish
from quantplug.core.graph.facts import (
    constant_value,
    describe,
    is_constant,
    is_held,
    operands,
    require_graph_module,
    tensor_value,
)
from quantplug.core.patterns.language import Match, op, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.qdq.qparams import FULL_RANGE, QD, dequantize, is_static, qparams, quantize
from quantplug.core.specs.limits import ONEDNN_PAIRS
from quantplug.lowering.agreement import agreement
from quantplug.lowering.halves import spell_out_halves
from quantplug.lowering.open_sizes import open_sizes
from quantplug.lowering.openvino.defects import step_aside
from quantplug.lowering.openvino.four_bits import store_in_four_bits
from quantplug.lowering.openvino.products import fold_products
from quantplug.lowering.openvino.program import OpenVINOProgram, runtime, said
from quantplug.lowering.openvino.state import Variable, expose
from quantplug.lowering.outputs import make_distinct
from quantplug.lowering.placement import record
from quantplug.lowering.processor import largest_factors
from quantplug.lowering.program import refusal, require_float_dtype
from quantplug.lowering.rewrites.control import quantized_branches_are_inlined
from quantplug.lowering.scopes import require_no_autocast
from quantplug.lowering.signature import FixedInput, Signature
from quantplug.lowering.sources import sources
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.starting import starting, twin

_ATEN = torch.ops.aten
_HINTS = {torch.float32: "f32", torch.bfloat16: "bf16"}
# By default OpenVINO quantizes the activations of layers whose weights alone are integers too, in groups of 32.
_AS_WRITTEN = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


@torch.no_grad()
def lower(
    converted: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    float_dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] | None = None,
) -> OpenVINOProgram:
    """Hands a q/dq graph to OpenVINO.

    Args:
        converted: what `convert_pt2e` returned; it is not changed.
        example_inputs: inputs as for `torch.export.export`; the program is run on them.
        dynamic_shapes: as for `torch.export.export`; None for the sizes that are dynamic in the graph itself.
        float_dtype: torch.bfloat16 lets OpenVINO take bfloat16 where it computes in float, which is faster on
            processors with AMX.
        options: properties for OpenVINO's CPU plugin; by default the least latency on as many threads as torch
            has, and no activation quantized that the graph does not quantize ("DYNAMIC_QUANTIZATION_GROUP_SIZE": 32
            lets OpenVINO do that for weight-only layers, at about 40 dB). The program keeps them when it is saved;
            those beyond precision, hint, threads and that size have to be given to `OpenVINOProgram.load` again.

    Raises:
        ModelError: `converted` is no graph module.
        LoweringError: openvino is not installed, the graph is quantized dynamically, the front end refuses it, the
            program does not compute what the graph computes, or `float_dtype` is another dtype.
    """
    source = require_graph_module(converted, "lower")
    openvino = runtime()
    require_float_dtype(float_dtype)
    options = {**_AS_WRITTEN, "INFERENCE_PRECISION_HINT": _HINTS[float_dtype], **(options or {})}
    _require_static(source.graph)
    module = quantized_branches_are_inlined(starting(source))
    require_no_autocast(module.graph, "OpenVINO's front end does")
    reference, recorded = twin(module), record(module.graph)
    pair = _require_pairs(module.graph)
    spell_plainly(module.graph)
    halves = spell_out_halves(module.graph)
    step_aside(module.graph)
    apply(module.graph, GIVEN)
    _write_outputs_out(module.graph)
    apply(module.graph, NARROW)
    outputs = make_distinct(module)
    finish(module)
    # As the graph has them: the user's own may name parameters that it has no longer, or sizes that got a condition.
    shapes = open_sizes(module.graph, example_inputs) or dynamic_shapes
    try:
        exported = torch.export.export(module, example_inputs, dynamic_shapes=shapes)
        with _logging_as_it_was():
            decoder, variables, places = _decoder(exported, is_dynamic=shapes is not None)
            model = openvino.convert_model(decoder)
        signature = Signature.of_exported(exported)
        _drop_fixed(model, signature)
        fold_products(model)
        store_in_four_bits(model)
        program = OpenVINOProgram(model, signature, outputs.moved(places), options, pair, variables)
        program(*example_inputs)
        program.restart()
        found = program(*example_inputs)  # the second call: what a kernel left behind in the first shows
        program.restart()
    except LoweringError:
        raise
    except OSError as error:
        raise refusal("OpenVINO", error) from error
    except Exception as error:
        raise LoweringError(
            f"OpenVINO does not take the q/dq graph ({said(error)}); keep the operator it names float, "
            "or use backend 'x86'."
        ) from error
    if float_dtype is torch.float32:
        agreement(found, twin(reference)(*example_inputs), reference, example_inputs)
    operators = {operator.node for operator in recorded}
    program.place(recorded, sources(decoder.pt_module.graph.nodes, module.graph, operators))
    program.ops = tuple(
        dataclasses.replace(operator, reason=halves.get(operator.node, operator.reason)) for operator in program.ops
    )
    return program


def _require_static(graph: fx.Graph) -> None:
    dynamic = next((node for node in graph.nodes if "choose_qparams" in str(node.target)), None)
    if dynamic is not None:
        raise LoweringError(
            f"Node {describe(dynamic)} computes quantization parameters at run time, which OpenVINO's front end does "
            "not read; quantize with a static or weight-only config, or use backend 'x86'."
        )


def _require_pairs(graph: fx.Graph) -> int:
    """Returns how large the sum of two products can get; OpenVINO's kernels overflow where those of torch do."""
    activation, weight = largest_factors(graph)
    both = 2 * activation**2 if any(map(_multiplies_activations, graph.nodes)) else 0
    pair = max(activation * weight, both)
    reason = ONEDNN_PAIRS.objection(pair)
    if reason is not None:
        raise LoweringError(f"The graph would give wrong numbers in OpenVINO: {reason}.")
    return pair


def _multiplies_activations(node: fx.Node) -> bool:
    """Tells whether a node is a product of two tensors that are both quantized and no constants."""
    is_product = node.target in (_ATEN.bmm.default, _ATEN.matmul.default, _ATEN.mm.default)
    return is_product and all(is_dequantize(part) and not is_constant(part.args[0]) for part in node.all_input_nodes)


def _decoder(exported: torch.export.ExportedProgram, *, is_dynamic: bool) -> tuple[Any, list[Variable], list[int]]:
    """Returns what OpenVINO's front end reads, the buffers that it carries, and where the outputs are beside them."""
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    decoder = TorchFXPythonDecoder.from_exported_program(exported, dynamic_shapes=is_dynamic)
    variables, places = expose(decoder.pt_module)
    if variables:
        decoder = TorchFXPythonDecoder(decoder.pt_module, dynamic_shapes=is_dynamic)
    return decoder, variables, places


@contextmanager
def _logging_as_it_was() -> Iterator[None]:
    """Keeps back the front end's traces about decompositions that this torch does not have.

    What OpenVINO refuses, it leaves with its own level, filter and handler in the root logger.
    """
    root = logging.getLogger()
    level, filters, handlers = root.level, root.filters[:], root.handlers[:]
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
        root.filters[:], root.handlers[:] = filters, handlers


def _drop_fixed(model: Any, signature: Signature) -> None:
    """Takes away inputs that are no tensors; the graph holds their values, and OpenVINO knows no type for them."""
    parameters = model.get_parameters()
    for parameter, given in zip(parameters, signature.inputs, strict=False):  # those of the state follow
        if isinstance(given, FixedInput):
            model.remove_parameter(parameter)


def _scaled(match: Match) -> fx.Node | str:
    """Writes (integers - zero point) * scale in float32."""
    node, given = match.root, operands(match.root)
    is_given = is_held(given["input"]) or given["input"].op == "placeholder"
    integers = tensor_value(given["input"])
    if not is_given or integers is None:
        return "its integers are computed at run time"
    names = ("scales", "zero_points") if "scales" in given else ("scale", "zero_point")
    scale, zero_point = (_along_axis(given[name], integers, given.get("axis")) for name in names)
    step = call(node, _ATEN.to.dtype, (given["input"], torch.float32), node)
    if bool(zero_point.any()):
        step = call(node, _ATEN.sub.Tensor, (step, constant(node, f"{node.name}_zero_point", zero_point)), node)
    return call(node, _ATEN.mul.Tensor, (step, constant(node, f"{node.name}_scale", scale)), node)


def _along_axis(found: Any, integers: Tensor, axis: int | None) -> Tensor:
    numbers = constant_value(found) if isinstance(found, fx.Node) else found
    shape = [1] * integers.dim()
    if axis is not None:
        shape[axis] = -1
    return torch.as_tensor(0 if numbers is None else numbers).detach().to(torch.float32).reshape(shape)


def _clamped(match: Match) -> fx.Node | str:
    """Lets floats end where the integers do: OpenVINO has kernels for whole ranges only."""
    node, params = match.root, qparams(match.root)
    if params.is_full_range or params.dtype not in FULL_RANGE or node.target is not QD.quantize_per_tensor.default:
        return "its range is all of its dtype"
    if any(reader.target is not QD.dequantize_per_tensor.default for reader in node.users):
        return "its integers are also read directly"
    clamped = call(node, _ATEN.clamp.default, (match["x"], *params.bounds), match["x"])
    whole = (params.scale, params.zero_point, *FULL_RANGE[params.dtype], params.dtype)
    for reader in list(node.users):
        reader.args = (node, *whole)
    node.args = (clamped, *whole)
    return node


def _write_outputs_out(graph: fx.Graph) -> None:
    """Writes out how integers of outputs are made: OpenVINO takes quantize for a rounding of floats."""
    outputs = graph.output_node()
    for node in list(outputs.all_input_nodes):
        if is_quantize(node) and is_static(node) is None:
            outputs.replace_input_with(node, _integers(node))
            erase_unused((node,))


def _integers(node: fx.Node) -> fx.Node:
    source, params = operands(node)["input"], qparams(node).static()
    step = call(node, _ATEN.mul.Tensor, (source, 1.0 / params.scale), source)
    step = call(node, _ATEN.round.default, (step,), step)
    step = call(node, _ATEN.add.Tensor, (step, float(params.zero_point)), step)
    step = call(node, _ATEN.clamp.default, (step, params.quant_min, params.quant_max), step)
    return call(node, _ATEN.to.dtype, (step, params.dtype), node, params.dtype)


NARROW = (Rule(quantize(input=value("x")), _clamped),)
GIVEN = (
    Rule(dequantize(input=value("integers")), _scaled),
    Rule(op("quantized_decomposed::dequantize_per_channel", input=value("integers")), _scaled),
)
