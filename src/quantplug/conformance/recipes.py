"""What the operands of ATen operators look like that a pattern leaves open: shapes, strides, dimensions.

Before: an operator, the size of a sample, and the operands that are known already. After: a value, a shape or
a constant for every other operand that has to be given. Operators without an entry are taken to be elementwise:
tensors of one shape, and the schema's defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from quantplug.core.graph.operators import DROPOUTS, SHUFFLES
from quantplug.core.peers.torch_names import OpOverload


@dataclass(frozen=True)
class Sample:
    """The size and the sign of the data of one piece.

    Attributes:
        number: chooses strides, groups and dimensions.
        batch: samples of a batch; one, or three, as a kernel may be wrong from the third on.
        channels: channels or features.
        size: of each spatial dimension.
        sign: "both", more often positive; "positive" (the zero point is the least integer); "negative" (the greatest).
    """

    number: int
    batch: int
    channels: int
    size: int
    sign: str

    @property
    def image(self) -> tuple[int, ...]:
        """A shape of four dimensions."""
        return (self.batch, self.channels, self.size, self.size)


SAMPLES = (
    Sample(0, 1, 3, 8, "both"),
    Sample(1, 3, 8, 7, "positive"),
    Sample(2, 3, 5, 6, "negative"),
    Sample(3, 3, 6, 9, "both"),
)


@dataclass(frozen=True)
class Shape:
    """A float tensor that is an input of the model."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Constant:
    """A parameter, or a buffer such as running statistics, drawn from a normal distribution or from a few values."""

    sizes: tuple[int, ...]
    positive: bool = False
    is_buffer: bool = False
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Indices:
    """An integer tensor that is an input of the model, with values below a limit."""

    sizes: tuple[int, ...]
    limit: int


Operands: TypeAlias = dict[str, Any]
Known: TypeAlias = Mapping[str, Any]
Recipe: TypeAlias = Callable[[Sample, Known], Operands]

# What an overload asks for: a padding in words takes no stride, batches without running statistics are training.
_OVERLOADS: Mapping[str, Operands] = {"padding": {"padding": "same", "stride": 1}, "no_stats": {"training": True}}

# Operators whose operands have to be greater than zero.
POSITIVE = ("div", "log", "log2", "log10", "log1p", "pow", "rsqrt", "sqrt", "reciprocal")


def operands_for(target: Any, sample: Sample, known: Known) -> Operands:
    """Returns what the open operands of an operator are; those that have defaults may be left out."""
    name, overload = str(target).split(".")[1:] if isinstance(target, OpOverload) else (str(target), "")
    recipe = _RECIPES.get(name if name.startswith("_") else name.rstrip("_"), _elementwise)
    return {**recipe(sample, known), **_OVERLOADS.get(overload, {})}


def _elementwise(sample: Sample, known: Known) -> Operands:
    like = next((value for value in known.values() if isinstance(value, Tensor)), None)
    return {"*": Shape(sample.image if like is None else tuple(like.shape))}


def _pair(sample: Sample, known: Known) -> Operands:
    """Two tensors of one shape, and each with one number for a channel beside the other whole."""
    whole = _elementwise(sample, known)["*"]
    narrow = Shape(tuple(size if axis == 1 else 1 for axis, size in enumerate(whole.sizes)))
    return {"*": whole, **{1: {"other": narrow}, 2: {"self": narrow}}.get(sample.number, {})}


def _hardtanh(sample: Sample, known: Known) -> Operands:
    """A relu with an upper bound, which is all that some kernels have, and one that begins below zero."""
    return {**_elementwise(sample, known), "min_val": 0.0 if sample.number == 0 else -0.5, "max_val": 0.75}


def _shape(known: Known, name: str, otherwise: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(known[name].shape) if name in known else otherwise


def _convolution(dims: int, transposed: bool = False) -> Recipe:
    """Whole, strided, depthwise, and dilated in groups of several channels; what is not 1 differs by dimension."""

    def recipe(sample: Sample, known: Known) -> Operands:
        shape = _shape(known, "input", (sample.batch, sample.channels, *[sample.size] * dims))
        crossed = known.get("transposed", transposed)
        channels, groups = shape[1], _groups(sample, shape[1], crossed)
        made = channels if groups == channels else groups * (channels // groups + 3)
        pair = (channels, made // groups) if crossed else (made, channels // groups)
        return {
            "input": Shape(shape),
            "weight": Constant((*pair, *[3] * dims)),
            "bias": Constant((made,)),
            "stride": _first(2 if sample.number == 1 else 1, 1, dims),
            "padding": _first(sample.number % 2, 0, dims),
            "dilation": _first(2 if sample.number == 3 else 1, 1, dims),
            "output_padding": [0] * dims,
            "groups": groups,
        }

    return recipe


def _first(value: int, others: int, dims: int) -> list[int]:
    """Returns a value for the first dimension and another for the rest, so that kernels cannot mix them up."""
    return [value, *[others] * (dims - 1)]


def _groups(sample: Sample, channels: int, crossed: bool) -> int:
    if sample.number == 2 and not crossed:
        return channels
    return 2 if sample.number == 3 and channels % 2 == 0 else 1


def _linear(sample: Sample, known: Known) -> Operands:
    middle = (sample.size,) if sample.number == 1 else ()
    shape = _shape(known, "input", (sample.batch, *middle, 4 * sample.channels))
    made = 4 * sample.channels + 4
    return {"input": Shape(shape), "weight": Constant((made, shape[-1])), "bias": Constant((made,))}


def _addmm(sample: Sample, known: Known) -> Operands:
    features, made = 4 * sample.channels, 4 * sample.channels + 4
    one = Shape((sample.batch, features))
    return {"mat1": one, "self": Constant((made,)), "mat2": Constant((features, made))}


def _mm(sample: Sample, known: Known) -> Operands:
    features = 4 * sample.channels
    return {"self": Shape((sample.batch, features)), "mat2": Constant((features, 4 * sample.channels + 4))}


def _products(sample: Sample, known: Known) -> Operands:
    one = Shape((sample.batch, 4, sample.size))
    other = Shape((sample.batch, sample.size, 5))
    return {"self": one, "batch1": one, "mat2": other, "other": other, "batch2": other}


def _embedding(sample: Sample, known: Known) -> Operands:
    return {"weight": Constant((11, 4 * sample.channels)), "indices": Indices((sample.batch, sample.size), 11)}


def _batch_norm(sample: Sample, known: Known) -> Operands:
    shape = _shape(known, "input", sample.image)
    numbers = {"training": False, "momentum": 0.1, "eps": 2.0**-16, "cudnn_enabled": False}
    affine = {"weight": Constant((shape[1],), positive=True), "bias": Constant((shape[1],))}
    # Training divides by a root, folding multiplies by its reciprocal; with exact roots no weight depends on which.
    eps = float(known.get("eps", numbers["eps"]))
    variances = tuple(square - eps for square in (0.25, 1.0, 4.0))
    mean = Constant((shape[1],), is_buffer=True)
    variance = Constant((shape[1],), is_buffer=True, values=variances)
    return {"input": Shape(shape), **affine, "running_mean": mean, "running_var": variance, **numbers}


def _layer_norm(sample: Sample, known: Known) -> Operands:
    held = Constant((sample.channels + 4,))
    shape = Shape((sample.batch, sample.size, sample.channels + 4))
    return {"input": shape, "normalized_shape": [sample.channels + 4], "weight": held, "bias": held}


def _pooling(dims: int) -> Recipe:
    """Whole windows; windows over padding, of numbers on either side of zero; dilated; and sizes rounded up."""

    def recipe(sample: Sample, known: Known) -> Operands:
        padded = sample.number in (1, 2)
        return {
            "self": Shape((sample.batch, sample.channels, *[sample.size] * dims)),
            "kernel_size": [3 if padded else 2] * dims,
            "stride": [1 if sample.number == 2 else 2] * dims,
            "padding": [int(padded)] * dims,
            "dilation": [2 if sample.number == 2 else 1] * dims,
            "ceil_mode": sample.number == 3,
            "count_include_pad": sample.number != 2,
        }

    return recipe


def _given(**operands: Any) -> Recipe:
    def recipe(sample: Sample, known: Known) -> Operands:
        return {"self": Shape(sample.image), **operands}

    return recipe


def _sized(sizes: Callable[[tuple[int, ...]], list[int]], **operands: Any) -> Recipe:
    def recipe(sample: Sample, known: Known) -> Operands:
        shape = _shape(known, "self", sample.image)
        return {"self": Shape(shape), "size": sizes(shape), "shape": sizes(shape), **operands}

    return recipe


def _columns(sample: Sample, known: Known) -> Operands:
    return {"self": Shape((sample.size, sample.channels))}


def _single(sample: Sample, known: Known) -> Operands:
    return {"self": Shape((sample.batch + 1, sample.channels, 1, sample.size)), "dim": 2}


def _singles(sample: Sample, known: Known) -> Operands:
    """An expand that repeats, and one that repeats nothing, as export writes before every product of matrices."""
    wanted = [sample.batch + 1, sample.channels, sample.size]
    shape = (wanted[0], wanted[1] if sample.number == 1 else 1, wanted[2])
    return {"self": Shape(shape), "size": wanted}


def _unflatten(sample: Sample, known: Known) -> Operands:
    return {"self": Shape((sample.batch, 2 * sample.channels, sample.size)), "dim": 1, "sizes": [2, sample.channels]}


def _moved(sample: Sample, known: Known) -> Operands:
    return {"self": Shape(sample.image), "source": 1, "destination": 2}


def _twice(sample: Sample, known: Known) -> Operands:
    """Channels and sizes that a factor of 2 divides."""
    batch, channels, *sizes = sample.image
    doubled = Shape((batch, 4 * channels, *(2 * size for size in sizes)))
    return {"self": doubled, **dict.fromkeys(("upscale_factor", "downscale_factor", "groups"), 2)}


def _resize(sample: Sample, known: Known) -> Operands:
    sizes = [2 * sample.size, 2 * sample.size]
    return {"input": Shape(sample.image), "self": Shape(sample.image), "output_size": sizes, "align_corners": False}


def _flat(shape: tuple[int, ...]) -> list[int]:
    return [shape[0], -1]


_MEAN = _given(dim=[2, 3], keepdim=True)
_RECIPES: Mapping[str, Recipe] = {
    **{f"conv{dims}d": _convolution(dims) for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _convolution(dims, transposed=True) for dims in (1, 2, 3)},
    "convolution": _convolution(2),
    "linear": _linear,
    "addmm": _addmm,
    "mm": _mm,
    "matmul": _products,
    "bmm": _products,
    "baddbmm": _products,
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum"), _pair),
    "embedding": _embedding,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "layer_norm": _layer_norm,
    **{f"{kind}_pool{dims}d": _pooling(dims) for kind in ("max", "avg") for dims in (1, 2, 3)},
    "max_pool2d_with_indices": _pooling(2),
    "adaptive_avg_pool2d": _given(output_size=[1, 1]),
    "mean": _MEAN,
    "sum": _MEAN,
    "amax": _MEAN,
    "amin": _MEAN,
    "softmax": _given(dim=-1),
    "_softmax": _given(dim=-1, half_to_float=False),
    "log_softmax": _given(dim=-1),
    "hardtanh": _hardtanh,
    "clamp": _given(min=-0.5, max=0.75),
    "clamp_min": _given(min=-0.5),
    "clamp_max": _given(max=0.75),
    "pow": _given(exponent=2.0),
    "view": _sized(_flat),
    "reshape": _sized(_flat),
    "_unsafe_view": _sized(_flat),
    "flatten": _given(start_dim=1),
    "unflatten": _unflatten,
    "permute": _given(dims=[0, 2, 3, 1]),
    **dict.fromkeys(("transpose", "swapdims"), _given(dim0=1, dim1=2)),
    "swapaxes": _given(axis0=1, axis1=2),
    **dict.fromkeys(("movedim", "moveaxis"), _moved),
    **dict.fromkeys(("t", "numpy_T"), _columns),
    "squeeze": _single,
    "unsqueeze": _given(dim=1),
    "slice": _given(dim=1, start=1, end=3),
    "select": _given(dim=1, index=1),
    "narrow": _given(dim=1, start=1, length=2),
    "flip": _given(dims=[2]),
    "roll": _given(shifts=[1], dims=[2]),
    **{name: _twice for name in SHUFFLES if "shuffle" in name},
    "repeat_interleave": _given(repeats=2, dim=1),
    "expand": _singles,
    "repeat": _given(repeats=[1, 2, 1, 1]),
    "pad": _given(pad=[1, 1, 1, 1]),
    "constant_pad_nd": _given(pad=[1, 1, 1, 1]),
    **dict.fromkeys(DROPOUTS, lambda sample, known: {"input": Shape(sample.image), "p": 0.5}),
    "cat": _given(dim=1),
    "stack": _given(dim=1),
    "upsample_bilinear2d": _resize,
    "upsample_nearest2d": _resize,
}
