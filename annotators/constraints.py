"""Constraints that several operator families share: predicates that return None or the reason in words."""

import math
from collections.abc import Callable, Collection

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.graph.facts import constant_value, describe, is_constant, operands, rank, sizes_of
from quantplug.core.graph.operators import operator_overloads
from quantplug.core.patterns.language import Match


def static_only(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds for configs whose activations have scales that calibration fixes."""
    spec = config.input_activation
    return "the config quantizes weights only" if spec is None else not_dynamic(match, config)


def not_dynamic(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds for configs whose activations are float or have scales that calibration fixes."""
    spec = config.input_activation
    return "the config quantizes activations dynamically" if spec is not None and spec.is_dynamic else None


def in_integers(
    activations: Collection[torch.dtype], weights: Collection[torch.dtype] = (torch.int8,)
) -> Callable[[Match | None, QuantizationConfig], str | None]:
    """Returns what holds for configs whose integers are of dtypes that the kernels have; what stays float is left out.

    Args:
        activations: dtypes that the kernels read and write.
        weights: dtypes of their weights.
    """

    def check(match: Match | None, config: QuantizationConfig) -> str | None:
        asked = [("activations", spec, activations) for spec in (config.input_activation, config.output_activation)]
        if match is None or "w" in match:
            asked.append(("weights", config.weight, weights))
        for what, spec, known in asked:
            dtype = getattr(spec, "dtype", None)
            if dtype is not None and not dtype.is_floating_point and dtype not in known:
                choice = " or ".join(map(str, known))
                return f"the config quantizes {what} to {dtype}, and the kernels have {choice}"
        return None

    return check


def around_zero_if_wide(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds for configs whose activations of 16 bits have zero point 0, for kernels that know no other there."""
    for spec in (config.input_activation, config.output_activation):
        if getattr(spec, "dtype", None) == torch.int16 and spec.qscheme != torch.per_tensor_symmetric:
            return f"the config quantizes activations of 16 bits with {spec.qscheme}, the kernels around zero"
    return None


def activations_if_wide(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for products of two activations, and of constants where these have 8 bits, for kernels of 16 by 16 bits."""
    constant = next((match[name] for name in ("a", "b") if _is_of_constants(match[name])), None)
    if constant is None or getattr(config.input_activation, "dtype", None) != torch.int16:
        return None
    return f"it multiplies by {describe(constant)}, a constant of 16 bits, the kernels by weights of 8"


def _is_of_constants(node: fx.Node) -> bool:
    return is_constant(node) or bool(node.all_input_nodes and all(map(is_constant, node.all_input_nodes)))


def enough_work(products: int) -> Callable[[Match, QuantizationConfig], str | None]:
    """Returns what holds for convolutions that multiply each input number often enough, if its scale is of run time.

    Args:
        products: least number of products with one input number, for which finding its range and quantizing it
            at run time is worth it.
    """

    def check(match: Match, config: QuantizationConfig) -> str | None:
        if not_dynamic(match, config) is None:
            return None
        given, weight = operands(match["op"]), sizes_of(match["w"])
        window = math.prod(weight[2:]) // math.prod(given["stride"])
        found = weight[0] // given["groups"] * window
        return None if found >= products else f"{found} products with each number, too few to quantize it at run time"

    return check


def unsigned_if_dynamic(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds unless activations of run time are signed, for kernels of uint8: scales known before can be shifted."""
    spec = config.input_activation
    if not_dynamic(match, config) is None or spec is None or spec.dtype == torch.uint8:
        return None
    return f"the config quantizes activations to {spec.dtype} at run time, the kernel takes torch.uint8"


def quantizes_weight(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds for configs that quantize the weight, to a type that holds its numbers."""
    if config.weight is None:
        return "the config leaves weights float"
    dtype, weight = config.weight.dtype, None if match is None else constant_value(match["w"])
    if not dtype.is_floating_point or weight is None:
        return None
    largest = weight.detach().abs().max().item() if weight.numel() else 0.0
    limit = torch.finfo(dtype).max
    return f"its weight has {largest:.6g}, the limit of {dtype} is {limit:.6g}" if largest > limit else None


def weights_alone(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds for configs that leave activations float."""
    return None if config.input_activation is None else "it has no activation to quantize; give it a weight-only config"


def qat_only(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for configs of quantization-aware training, where batch norms stay in the graph."""
    return None if config.is_qat else "batch norm is folded before annotation unless the config is for training"


def depthwise_or_whole(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for convolutions of all channels "x" together or each by itself, for kernels with nothing between."""
    groups, channels = operands(match["op"])["groups"], sizes_of(match["x"])[1]
    return None if groups in (1, channels) else f"{groups} groups over {channels} channels, the kernels take 1 or all"


def images_with_batch(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for images "x" of four dimensions, for kernels that do not know one without a batch."""
    found = rank(match["x"])
    return None if found in (4, None) else f"its input has {found} dimensions, the kernel takes batches of images"


def equal_shapes(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for operands "a" and "b" of one shape, for kernels that do not broadcast."""
    first, second = sizes_of(match["a"]), sizes_of(match["b"])
    return None if first == second else f"operands of shapes {first} and {second}, the kernel takes equal ones"


def last_dimension(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for operators over the last dimension of "x", for kernels that walk along rows."""
    dim, last = operands(match["op"])["dim"], len(sizes_of(match["x"])) - 1
    return None if dim in (-1, last) else f"it goes over dimension {dim}, the kernel along the last"


def whole_windows(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for pooling without dilation and with sizes rounded down."""
    given = operands(match["op"])
    dilation = set(given.get("dilation", (1,)))
    return None if dilation == {1} and not given["ceil_mode"] else "the pooling is dilated or rounds sizes up"


def plain_windows(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for pooling of whole windows whose averages are divided by the size of the window."""
    divisor = operands(match["op"]).get("divisor_override")
    given = None if divisor is None else f"the average is divided by {divisor} whatever its window"
    return whole_windows(match, config) or given


def undilated(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for windows whose elements lie side by side, for kernels that spread none."""
    dilation = operands(match["op"])["dilation"]
    return None if set(dilation) == {1} else f"it is dilated by {list(dilation)}, the kernel spreads no window"


def even_sides(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for convolutions that pad as much before as behind, for kernels that know one width of padding."""
    given, weight = operands(match["op"]), sizes_of(match["w"])
    dilation = list(given["dilation"])
    reach = zip(dilation * (len(weight[2:]) // len(dilation)), weight[2:], strict=True)
    uneven = given["padding"] == "same" and any(step * (size - 1) % 2 for step, size in reach)
    return "padding 'same' is uneven for an even kernel size" if uneven else None


def padding_counts(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for averages over windows that are all divided by one number, also at a padded border."""
    given = operands(match["op"])
    counts = given["count_include_pad"] or not any(given["padding"])
    return None if counts else "the average leaves the padding out, so that windows at the border count less"


def equal_windows(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for adaptive pooling of an image "x" whose windows all have one size that is known."""
    image, wanted = sizes_of(match["x"])[-2:], operands(match["op"])["output_size"]
    if len(image) == 2 and all(_divides(out, size) for size, out in zip(image, wanted, strict=True)):
        return None
    return f"an image of {image} has no equal windows for averages of {tuple(wanted)}"


def _divides(number: object, size: object) -> bool:
    return isinstance(size, int) and isinstance(number, int) and size % number == 0


def known_number(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for means of "x" over dimensions whose sizes are known."""
    sizes = sizes_of(match["x"])
    dims = operands(match["op"]).get("dim") or range(len(sizes))
    found = tuple(sizes[dim] for dim in dims) if sizes else ("?",)
    return None if all(isinstance(size, int) for size in found) else f"the mean is over {found} elements"


def whole_map(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds for averages over height and width of four dimensions that keep both, for kernels of global pooling."""
    given, dimensions = operands(match["op"]), len(sizes_of(match["x"]))
    if "output_size" in given:
        holds = dimensions == 4 and list(given["output_size"]) == [1, 1]
    else:
        dims = sorted(dim % 4 for dim in given.get("dim") or ())
        holds = dimensions == 4 and dims == [2, 3] and given["keepdim"] and given.get("dtype") is None
    return None if holds else "it is no average over height and width that keeps both dimensions"


def repeats_nothing(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds unless an expand yields more elements than it reads, for targets without a kernel for that."""
    node = match["op"]
    grows = math.prod(sizes_of(node)) != math.prod(sizes_of(match["x"]))
    expands = node.target in operator_overloads("expand")
    return "it repeats elements along a dimension, for which there is no kernel" if expands and grows else None


def has_dimensions(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds unless an operand of run time is a tensor of no dimension, for targets that cannot lay one out."""
    plain = next((n for n in match["op"].all_input_nodes if rank(n) == 0 and not is_constant(n)), None)
    return None if plain is None else f"'{plain.name}' is a tensor of no dimension, for which there is no layout"


def one_group_or_scale(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for transposed convolutions without groups, and for weights of one scale.

    Groups share the axis of the weight that holds output channels, and with it their scales.
    """
    groups = operands(match["op"])["groups"]
    by_channel = getattr(config.weight, "qscheme", None) in (torch.per_channel_symmetric, torch.per_channel_affine)
    return f"{groups} groups, of which each would need scales of its own" if groups > 1 and by_channel else None


# Those that look at the config alone: they tell under which configs a rule can apply at all.
OF_CONFIG = (around_zero_if_wide, static_only, not_dynamic, unsigned_if_dynamic, quantizes_weight, weights_alone)
