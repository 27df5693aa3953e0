"""Faults planted into q/dq graphs of real small models: what was done to which layer, and what it is called."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import MobileNet, Transformer, exported, observed, settled
from torch import fx, nn

import quantplug
from quantplug.core.graph.facts import attribute
from quantplug.core.graph.working_copy import working_copy
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.report import faults
from quantplug.demo import DigitNet


@dataclass(frozen=True)
class Plant:
    """One fault.

    Attributes:
        net: the family of the model.
        layer: the operator whose layer it is planted in.
        kind: what it is.
        edit: does it, to the converted graph.
        also: layers that are as guilty.
        config: of the backend.
        before: does something to the float model, before it is quantized.
        observe: does something to the prepared model, once it is calibrated.
    """

    net: str
    layer: str
    kind: str
    edit: Callable[[fx.GraphModule, str], None] = lambda model, layer: None
    also: tuple[str, ...] = ()
    config: str = "int8"
    before: Callable[[nn.Module], None] | None = None
    observe: Callable[[fx.GraphModule], None] | None = None


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )


@functools.cache
def net(family: str) -> tuple[nn.Module, torch.Tensor]:
    """Returns a model in eval mode and a batch for it."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if family == "residual":
            x = torch.randn(16, 1, 8, 8)
            return settled(DigitNet(16), x), x
        if family == "depthwise":
            x = torch.randn(8, 3, 32, 32)
            return settled(MobileNet(), x), x
        if family == "transformer":
            return Transformer().eval(), torch.randn(8, 6, 16)
        return mlp().eval(), torch.randn(32, 16)


@functools.cache
def clean(
    family: str, backend: str, config: str = "int8", strict: bool = False
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the float graph and the q/dq graph of a model."""
    model, x = net(family)
    quantizer = quantplug.get_quantizer(backend).set_global(config)
    prepared = observed(model, quantizer, x, strict=strict)
    return exported(model, x, strict=strict), quantplug.convert_pt2e(prepared)


def planted(plant: Plant, backend: str) -> tuple[fx.GraphModule, fx.GraphModule, torch.Tensor]:
    """Returns the float graph, the q/dq graph with the fault, and a batch."""
    model, x = net(plant.net)
    if plant.before is None and plant.observe is None:
        floats, converted = clean(plant.net, backend, plant.config)
        converted = working_copy(converted)
    else:
        model = copy.deepcopy(model)
        (plant.before or (lambda m: None))(model)
        floats = exported(model, x)
        prepared = observed(model, quantplug.get_quantizer(backend).set_global(plant.config), x)
        (plant.observe or (lambda m: None))(prepared)
        converted = quantplug.convert_pt2e(prepared)
    plant.edit(converted, plant.layer)
    converted.graph.lint()
    converted.recompile()
    return floats, converted, x


def node(model: fx.GraphModule, name: str) -> fx.Node:
    return next(found for found in model.graph.nodes if found.name == name)


def pair_behind(model: fx.GraphModule, name: str) -> tuple[fx.Node, list[fx.Node]]:
    """Returns the quantize node that rounds what a layer yields, and the dequantize nodes that read it."""
    found = node(model, name)
    while not is_quantize(found):
        found = next((user for user in found.users if is_quantize(user)), None) or next(iter(found.users))
    return found, [user for user in found.users if is_dequantize(user)]


def _write(pair: tuple[fx.Node, list[fx.Node]], **values: Any) -> None:
    places = {"scale": 1, "zero_point": 2}
    for qdq in (pair[0], *pair[1]):
        for name, value in values.items():
            qdq.update_arg(places[name], value)


def range_times(factor: float) -> Callable[[fx.GraphModule, str], None]:
    def edit(model: fx.GraphModule, layer: str) -> None:
        pair = pair_behind(model, layer)
        _write(pair, scale=pair[0].args[1] * factor)

    return edit


def zero_point_moved(by: int) -> Callable[[fx.GraphModule, str], None]:
    def edit(model: fx.GraphModule, layer: str) -> None:
        pair = pair_behind(model, layer)
        numbers: tuple[Any, ...] = pair[0].args
        zero, low, high = numbers[2:5]
        moved = zero + by if low <= zero + by <= high else zero - by
        _write(pair, zero_point=moved)

    return edit


def readers_scale_times(factor: float) -> Callable[[fx.GraphModule, str], None]:
    def edit(model: fx.GraphModule, layer: str) -> None:
        for back in pair_behind(model, layer)[1]:
            back.update_arg(1, back.args[1] * factor)

    return edit


def observer_never_ran(model: fx.GraphModule, layer: str) -> None:
    """The numbers that torchao's observers begin with."""
    _write(pair_behind(model, layer), scale=1.0, zero_point=0)


def observer_saw_zeros(model: fx.GraphModule, layer: str) -> None:
    """The least scale: what observers give a tensor that was zero throughout."""
    _write(pair_behind(model, layer), scale=torch.finfo(torch.float32).eps)


def ranges_swapped(other: str) -> Callable[[fx.GraphModule, str], None]:
    def edit(model: fx.GraphModule, layer: str) -> None:
        one, two = pair_behind(model, layer), pair_behind(model, other)
        numbers = [{"scale": pair[0].args[1], "zero_point": pair[0].args[2]} for pair in (one, two)]
        _write(one, **numbers[1])
        _write(two, **numbers[0])

    return edit


def weight_of(model: fx.GraphModule, layer: str, operand: int = 1) -> fx.Node:
    found = node(model, layer).args[operand]
    assert isinstance(found, fx.Node)
    return found


def _replace(model: fx.GraphModule, read: Any, value: torch.Tensor) -> None:
    owner, _, leaf = str(read.target).rpartition(".")
    holder = attribute(model, owner) if owner else model
    delattr(holder, leaf)
    holder.register_buffer(leaf, value)


def held(model: fx.GraphModule, read: Any) -> torch.Tensor:
    return attribute(model, str(read.target)).detach().clone()


def channel_zeroed(channel: int) -> Callable[[fx.GraphModule, str], None]:
    def edit(model: fx.GraphModule, layer: str) -> None:
        integers = weight_of(model, layer).args[0]
        value = held(model, integers)
        value[channel] = 0
        _replace(model, integers, value)

    return edit


def scales_along_inputs(model: fx.GraphModule, layer: str) -> None:
    weight = weight_of(model, layer)
    weight.update_arg(3, 1)


def scales_times(factor: float) -> Callable[[fx.GraphModule, str], None]:
    def edit(model: fx.GraphModule, layer: str) -> None:
        scales = weight_of(model, layer).args[1]
        _replace(model, scales, held(model, scales) * factor)

    return edit


def scales_rolled(model: fx.GraphModule, layer: str) -> None:
    """Each channel has its neighbour's scale."""
    scales = weight_of(model, layer).args[1]
    _replace(model, scales, held(model, scales).roll(1))


def scales_swapped(other: str) -> Callable[[fx.GraphModule, str], None]:
    def edit(model: fx.GraphModule, layer: str) -> None:
        one, two = (weight_of(model, name).args[1] for name in (layer, other))
        values = held(model, one), held(model, two)
        _replace(model, one, values[1])
        _replace(model, two, values[0])

    return edit


def weight_clipped(at: int) -> Callable[[fx.GraphModule, str], None]:
    def edit(model: fx.GraphModule, layer: str) -> None:
        integers = weight_of(model, layer).args[0]
        _replace(model, integers, held(model, integers).clamp(-at, at))

    return edit


def weight_transposed(model: fx.GraphModule, layer: str) -> None:
    integers = weight_of(model, layer).args[0]
    _replace(model, integers, held(model, integers).transpose(0, 1).contiguous())


def bias_doubled(model: fx.GraphModule, layer: str) -> None:
    """Twice the scale where the bias is stored in integers; twice the bias where it is float."""
    bias = weight_of(model, layer, 2)
    if not is_dequantize(bias):
        _replace(model, bias, held(model, bias) * 2)
    elif isinstance(bias.args[1], fx.Node):
        _replace(model, bias.args[1], held(model, bias.args[1]) * 2)
    else:
        bias.update_arg(1, bias.args[1] * 2)


def left_float(model: fx.GraphModule, layer: str) -> None:
    """The layer reads floats: its operands without their rounding, its weight as a float constant."""
    operator = node(model, layer)
    for place, source in enumerate(operator.args):
        if not isinstance(source, fx.Node) or not is_dequantize(source):
            continue
        inner = source.args[0]
        if is_quantize(inner):
            operator.update_arg(place, inner.args[0])
            continue
        scale: Any = held(model, source.args[1]) if isinstance(source.args[1], fx.Node) else source.args[1]
        integers = held(model, inner).float()
        scale = torch.as_tensor(scale).reshape([-1] + [1] * (integers.dim() - 1))
        model.register_buffer(f"float_{layer}_{place}", integers * scale)
        with model.graph.inserting_before(operator):
            constant = model.graph.get_attr(f"float_{layer}_{place}")
        constant.meta["val"] = source.meta["val"]
        operator.update_arg(place, constant)
    model.graph.eliminate_dead_code()


def weight(model: nn.Module, path: str) -> torch.Tensor:
    return model.get_parameter(f"{path}.weight")


def outlier(path: str, channel: int, factor: float) -> Callable[[nn.Module], None]:
    def before(model: nn.Module) -> None:
        with torch.no_grad():
            weight(model, path)[channel] *= factor

    return before


def grown(path: str, factor: float) -> Callable[[nn.Module], None]:
    def before(model: nn.Module) -> None:
        with torch.no_grad():
            weight(model, path).mul_(factor)

    return before


def spread(path: str) -> Callable[[nn.Module], None]:
    """Makes channels of different magnitudes, in no order."""

    def before(model: nn.Module) -> None:
        rows = len(weight(model, path))
        factors = torch.logspace(-1, 0.5, rows)[torch.arange(rows) * 7 % rows]
        with torch.no_grad():
            weight(model, path).mul_(factors[:, None])

    return before


def stuck(name: str, share: float) -> Callable[[fx.GraphModule], None]:
    """An observer that saw the first numbers only, of a share of the size of the others."""

    def observe(prepared: fx.GraphModule) -> None:
        found = node(prepared, name)
        while found.op != "call_module":
            found = next(iter(found.users))
        observer = prepared.get_submodule(str(found.target))
        values = torch.linspace(-1, 1, 512)
        observer.reset() if hasattr(observer, "reset") else observer.reset_min_max_vals()
        observer(values * share)

    return observe


PLANTS = {
    "range of a convolution cut to a third": Plant("residual", "conv2d_1", faults.CLIPPED, range_times(0.33)),
    "range of a linear layer cut to a quarter": Plant("mlp", "linear_1", faults.CLIPPED, range_times(0.25)),
    "range of a depthwise convolution cut": Plant("depthwise", "conv2d_5", faults.CLIPPED, range_times(0.4)),
    "range of gelu cut": Plant("transformer", "linear_2", faults.CLIPPED, range_times(0.25)),
    "range of the input cut": Plant("residual", "x", faults.CLIPPED, range_times(0.3)),
    "sum that saturates": Plant("residual", "add", faults.SATURATING, range_times(0.3), also=("conv2d_2",)),
    "range ten times too wide": Plant("mlp", "linear", faults.WIDE, range_times(10)),
    "range of a projection twelve times too wide": Plant("depthwise", "conv2d_6", faults.WIDE, range_times(12)),
    "zero point of a layer norm moved": Plant("transformer", "layer_norm_1", faults.ZERO_POINT, zero_point_moved(70)),
    "zero point of a depthwise block moved": Plant("depthwise", "conv2d_12", faults.ZERO_POINT, zero_point_moved(60)),
    "readers take another scale": Plant("residual", "conv2d_3", faults.MISMATCH, readers_scale_times(1.5)),
    "observer that never ran": Plant("transformer", "layer_norm", faults.STUCK, observer_never_ran),
    "observer that saw zeros": Plant("mlp", "linear_2", faults.STUCK, observer_saw_zeros),
    "observer stuck at a hundredth": Plant("mlp", "linear_1", faults.STUCK, observe=stuck("relu_1", 0.002)),
    "ranges of two layers swapped": Plant(
        "mlp", "linear_2", faults.SWAPPED_RANGES, ranges_swapped("input_1"), also=("input_1",)
    ),
    "dead channel": Plant("residual", "conv2d_2", faults.DEAD, channel_zeroed(3)),
    "dead depthwise channel": Plant("depthwise", "conv2d_2", faults.DEAD, channel_zeroed(5)),
    "scales along the wrong axis": Plant("mlp", "linear_1", faults.AXIS, scales_along_inputs, before=spread("2")),
    "scales one place off": Plant("mlp", "linear_2", faults.SCALES, scales_rolled, before=spread("4")),
    "scales twice as large": Plant("transformer", "linear_1", faults.SCALES, scales_times(2)),
    "scales of two layers swapped": Plant(
        "mlp", "linear_1", faults.SWAPPED_SCALES, scales_swapped("linear_2"), also=("linear_2",), before=grown("2", 4)
    ),
    "weight cut off": Plant("depthwise", "conv2d_8", faults.CLIPPED_WEIGHT, weight_clipped(40)),
    "weight transposed": Plant("mlp", "linear_2", faults.WEIGHT, weight_transposed),
    "bias twice as large": Plant("residual", "conv2d_1", faults.BIAS, bias_doubled),
    "bias of a linear layer twice as large": Plant("mlp", "linear_1", faults.BIAS, bias_doubled),
    "outlier channel under one scale": Plant(
        "mlp", "linear_1", faults.OUTLIER, config="int8_per_tensor", before=outlier("2", 7, 40)
    ),
    "outlier channel of a convolution": Plant(
        "residual", "conv2d_3", faults.OUTLIER, config="int8_per_tensor", before=outlier("widen.0", 2, 60)
    ),
    "float island": Plant("residual", "conv2d_3", faults.ISLAND, left_float),
    "float island in a perceptron": Plant("mlp", "linear_1", faults.ISLAND, left_float),
}  # fmt: skip
