"""What torch.ao's patterns are made of, in ATen's words.

Before: a module class, a function, the name of a tensor method, or a tuple of them in either order. After: a
sequence of operator names from the first to the last: `(nn.ReLU, nn.Conv2d)` is `("conv2d", "relu")`.
"""

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quantplug.core.errors import ConfigError, PatternError
from quantplug.core.graph.operators import CLAMPS, operator_overloads
from quantplug.core.peers.torch_names import OpOverload, OpOverloadPacket, schema_of

RESIDUAL = "residual"
"""In a sequence: the sum of what comes before and another tensor."""

TENSORS = ("Tensor", "List[Tensor]")
"""The types of operands that have to be given as tensors."""

INTERPOLATIONS = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
_CURVES = ("leaky_relu", "elu", "tanh", "sigmoid", "hardsigmoid", "hardswish", "gelu", "silu", "softmax")
ACTIVATIONS = frozenset((*CLAMPS, *_CURVES))

_ANY = "*"
_SIZES = "it asks for sizes, which export turns into numbers and symbols: no operator on a tensor is left"
_RECURRENT = "its weights and gates are inside of one operator, which has no form between dequantize and quantize"
_ABSENT = {
    "shape": _SIZES,
    "size": _SIZES,
    "floordiv": "it stands for arithmetic on sizes, which export turns into numbers and symbols",
    "identity": "an identity leaves no operator in an exported graph",
    "resize": "it changes the storage of its input, which the copy that quantization makes would hide",
    **dict.fromkeys(("lstm", "gru", "rnn", "lstmcell", "grucell", "rnncell"), _RECURRENT),
}
_TRAINING = (
    "training keeps the float operators with fake quantizes around them, and the rule of the float pattern covers them"
)
_QUANTIZED = "quantized modules are what a lowering makes, a pattern is about float operators"
_OTHER_NAMES = {
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "truediv": "div",
    "constant_pad2d": "pad",
    # Of several overloads these are the ones that move data by numbers.
    "narrow": "narrow.default",
    "repeat_interleave": "repeat_interleave.self_int",
}
# The names of fused modules: a product or a batch norm, what is fused onto it, the spatial dimensions.
_FUSED = re.compile(r"(Conv|Linear|BN)(Bn)?(Add)?(ReLU|LeakyReLU|Tanh)?(\d?d?)")


class NotApplicableError(Exception):
    """A pattern that has no counterpart in an exported graph; the text says why."""


def sequence(pattern: Any, fused: Mapping[Any, tuple[str, ...]], *, reversed_order: bool = False) -> tuple[str, ...]:
    """Returns the operators of a pattern from the first to the last.

    The order of a tuple is read off its items: activations come after batch norms, those after products.

    Args:
        pattern: an item or a (nested) tuple of items.
        fused: what fused modules of the backend's own are made of.
        reversed_order: the order to assume where the items do not tell.

    Raises:
        NotApplicableError: an item has no counterpart in an exported graph.
        ConfigError: an item is nothing that torch.ao's patterns are made of.
    """
    groups = [fused.get(item) or _operators(item) for item in _flat(pattern)]
    others = [group for group in groups if group != (_ANY,)]
    if len(others) < len(groups):
        others = [(RESIDUAL,) if group == ("add",) else group for group in others]
    ranks = [_rank(group[0]) for group in others]
    backwards = ranks != sorted(ranks) and ranks == sorted(ranks, reverse=True)
    undecided = reversed_order and len(set(ranks)) == 1
    return tuple(name for group in (others[::-1] if backwards or undecided else others) for name in group)


def _flat(pattern: Any) -> list[Any]:
    if not isinstance(pattern, tuple | list):
        return [pattern]
    return [item for part in pattern for item in _flat(part)]


def _rank(name: str) -> int:
    return {"batch_norm": 1, RESIDUAL: 2}.get(name, 3 if name in ACTIVATIONS else 0)


def _operators(item: Any) -> tuple[str, ...]:
    if isinstance(item, type):
        return _of_class(item)
    if isinstance(item, OpOverload | OpOverloadPacket):
        return (str(item).replace(".", "::", 1),)
    if not isinstance(item, str) and not callable(item):
        raise ConfigError(f"A pattern holds {item!r}; give a module class, a function or the name of a tensor method.")
    return (_known(function_name(item), item),)


def _of_class(kind: type) -> tuple[str, ...]:
    if kind.__name__ == "MatchAllNode":
        return (_ANY,)
    if ".qat." in kind.__module__:
        raise NotApplicableError(_TRAINING)
    if kind.__module__.startswith("torch.ao.nn.intrinsic.modules"):
        return _fused(kind.__name__)
    if kind.__module__.startswith("torch.ao.nn"):
        raise NotApplicableError(_QUANTIZED)
    if not kind.__module__.startswith("torch.nn.modules"):
        raise ConfigError(
            f"A pattern holds the class {kind.__module__}.{kind.__qualname__}, of which export leaves only the "
            "operators inside; name those instead, as functions."
        )
    return (_known(module_operator(kind), kind),)


def module_operator(kind: type[nn.Module]) -> str:
    """Returns the name of the operator that a class of torch.nn calls, such as "max_pool2d" for MaxPool2d."""
    joined = kind.__name__.replace("ReLU", "Relu").replace("SiLU", "Silu")
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", joined).lower()
    return re.sub(r"_norm\dd$", "_norm", name)


def function_name(function: Any) -> str:
    """Returns the name of the operator that a function or tensor method calls, such as "relu" for F.relu_."""
    if isinstance(function, str):
        return function.rstrip("_")
    # Several functions of torch.nn.functional are made by a factory and carry its name, not their own.
    namespaces = (F, torch, operator)
    same_object = (
        name for namespace in namespaces for name in dir(namespace) if getattr(namespace, name, None) is function
    )
    return next(same_object, getattr(function, "__name__", repr(function))).strip("_")


def _known(name: str, item: Any) -> str:
    if name in _ABSENT:
        raise NotApplicableError(_ABSENT[name])
    name = _OTHER_NAMES.get(name, name)
    try:
        for target in targets(name):
            operator_overloads(target)
    except PatternError as error:
        raise ConfigError(f"The pattern item {item!r} is no operator of an exported graph: {error}") from None
    return name


def targets(name: str) -> tuple[str, ...]:
    """Returns the operators that a name of a sequence stands for in exported graphs."""
    if name == "interpolate":
        return tuple(f"upsample_{mode}.vec" for mode in INTERPOLATIONS)
    return (name,)


def arguments(name: str) -> dict[str, str]:
    """Returns the operands of an operator with their types, of the overload that takes the most tensors."""
    schemas = sorted((schema_of(overload) for overload in operator_overloads(targets(name)[0])), key=_by_tensors)
    return {argument.name: str(argument.type) for argument in schemas[-1].arguments}


def _by_tensors(schema: Any) -> tuple[int, str]:
    return sum(str(argument.type) in TENSORS for argument in schema.arguments), str(schema)


def _fused(name: str) -> tuple[str, ...]:
    found = _FUSED.fullmatch(name)
    if found is None:
        raise ConfigError(f"There is no fused module '{name}' that an exported graph could be matched with.")
    product, norm, added, activation, dims = found.groups()
    first = {"Conv": f"conv{dims}", "Linear": "linear", "BN": "batch_norm"}[product]
    last = {"ReLU": "relu", "LeakyReLU": "leaky_relu", "Tanh": "tanh"}.get(activation)
    parts = (first, "batch_norm" if norm else None, RESIDUAL if added else None, last)
    return tuple(part for part in parts if part)
