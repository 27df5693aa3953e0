"""Rules from sequences of operators: `("conv2d", "batch_norm", "relu")` becomes the annotator of that piece."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Number
from typing import Any

from quantplug.annotators.convolution import convolution, transposed_convolution
from quantplug.annotators.linear import linear
from quantplug.annotators.pattern import pattern_annotator
from quantplug.annotators.residual import residual
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.errors import ConfigError
from quantplug.core.patterns.language import Pattern, anything, constant, each, either, op, single_use, value
from quantplug.core.specs.dtypes import DTypeConfig
from quantplug.quantizers.importer.entries import PatternEntry
from quantplug.quantizers.importer.operators import RESIDUAL, TENSORS, arguments, targets

PRODUCTS: Mapping[str, Callable[[], Annotator]] = {
    "linear": partial(linear, ()),
    **{f"conv{d}d": partial(convolution, (d,), ()) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": partial(transposed_convolution, (d,), ()) for d in (1, 2, 3)},
}
_SHORT = {"batch_norm": "bn", RESIDUAL: "add"}
# Decomposed linear layers: the weight stands transposed.
_CHANNELS_LAST = ("addmm", "mm")
# Their second operand may be a number: torch.ao tells these cases apart by the number of tensors.
_WITH_NUMBERS = ("add", "sub", "mul", "div")
_SIX: dict[str, Any] = {"min_val": 0.0, "max_val": 6.0}


def label_of(sequence: tuple[str, ...]) -> str:
    """Returns how reports call a rule, such as "conv2d_bn_relu"; a batch norm on its own keeps its name."""
    parts = (name.rpartition("::")[2].partition(".")[0] for name in sequence)
    return "_".join(_SHORT.get(part, part) if position else part for position, part in enumerate(parts))


def rules(
    sequence: tuple[str, ...], entry: PatternEntry, observation: str, dtypes: tuple[DTypeConfig, ...]
) -> list[Annotator]:
    """Returns the annotators of a sequence.

    Args:
        sequence: operators from the first to the last.
        entry: the config that says which operands are weights, and how sums with numbers are observed.
        observation: "own", "shared" or "none".
        dtypes: the dtype configs it may run under.

    Raises:
        ConfigError: the sequence is none that can be matched.
    """
    if sequence[0] in PRODUCTS and observation == "own":
        return [_product(sequence, dtypes)]
    if {"batch_norm", RESIDUAL} & set(sequence[1:]):
        raise ConfigError(
            f"The pattern {entry.text} has a batch norm or a sum with another tensor after '{sequence[0]}', which is "
            "no convolution or linear layer that is observed by itself; give it as functions."
        )
    return [made.accepting(*_observed(made, dtypes)) for made in _plain(sequence, entry, observation, dtypes)]


def fusion_only(sequence: tuple[str, ...]) -> Annotator:
    """Returns the annotator of a piece that is fused and stays float: nothing is quantized at it or inside of it."""
    if sequence[0] in PRODUCTS:
        return replace(_product(sequence, ()), decide=lambda match, config: {}, output="float")
    base = op(*targets(sequence[0]), name="op")
    return pattern_annotator(label_of(sequence), _onto(base, sequence[1:]), inputs=(), observation="none")


def _observed(annotator: Annotator, dtypes: tuple[DTypeConfig, ...]) -> tuple[DTypeConfig, ...]:
    """A rule that observes no activation has no limits on their numbers, only on those of weights."""
    return dtypes if annotator.output != "float" or annotator.constraints else ()


def _product(sequence: tuple[str, ...], dtypes: tuple[DTypeConfig, ...]) -> Annotator:
    stock, rest = PRODUCTS[sequence[0]](), sequence[1:]
    family = stock.name
    if RESIDUAL in rest:
        # The batch norm before a sum is folded; in training such a piece is a batch norm of its own.
        stock, rest = residual(stock, ()), rest[rest.index(RESIDUAL) + 1 :]
        family = stock.name
    elif rest[:1] == ("batch_norm",):
        family, rest = f"{family}_bn", rest[1:]
    bases = [pattern for label, pattern in stock.patterns if label == family]
    label = label_of(sequence)
    patterns = tuple((label, _onto(base, rest)) for base in bases)
    return replace(stock, name=label, patterns=patterns, dtypes=dtypes)


def _onto(base: Pattern, following: tuple[str, ...]) -> Pattern:
    """Returns the pattern of a piece with further operators, each the only reader of the one before."""
    for name in following:
        base = _form(name, {_tensors(name)[0]: single_use(base)})
    return base


def _form(name: str, operands: Mapping[str, Any], bind: str | None = None) -> Pattern:
    called = op(*targets(name), name=bind, **operands)
    # Export writes the module of relu6 as a hardtanh.
    return either(called, op("hardtanh", name=bind, **operands, **_SIX)) if name == "relu6" else called


def _tensors(name: str) -> tuple[str, ...]:
    """Returns the operands of an operator that have to be tensors or lists of tensors, in the order of its schema."""
    found = tuple(operand for operand, kind in arguments(name).items() if kind in TENSORS)
    if not found:
        raise ConfigError(f"Operator '{name}' takes no tensor; a pattern needs one that does.")
    return found


def _plain(
    sequence: tuple[str, ...], entry: PatternEntry, observation: str, dtypes: tuple[DTypeConfig, ...]
) -> list[Annotator]:
    """Returns the annotators of a sequence whose first operator has no stock family."""
    name, rest = sequence[0], sequence[1:]
    inputs, weights = _roles(name, entry)
    quantized = weights if observation != "none" and any(dtype.at("weight") for dtype in dtypes) else ()
    axes = dict.fromkeys(quantized, int(name in _CHANNELS_LAST))
    operands: dict[str, Any] = {operand: _input(name, operand) for operand in inputs}
    operands |= {weight: constant(weight) for weight in quantized}
    whole = _onto(_form(name, operands, "op"), rest)
    two, one = (entry.observation(tensors) for tensors in (2, 1))
    if name not in _WITH_NUMBERS:
        return [_rule(label_of(sequence), whole, inputs, axes, observation, dtypes)]
    scalar = _onto(_form(name, operands | {inputs[1]: anything(None, _number)}, "op"), rest)
    return [
        _rule(label_of(sequence), whole, inputs, axes, two, dtypes),
        _rule(label_of((f"{name}_scalar", *rest)), scalar, inputs[:1], axes, one, dtypes),
    ]


def _rule(
    label: str,
    pattern: Pattern,
    inputs: tuple[str, ...],
    axes: Mapping[str, int],
    observation: str,
    dtypes: tuple[DTypeConfig, ...],
) -> Annotator:
    outputs = [dtype.at("output") for dtype in dtypes]
    exact = next((found for found in outputs if found is not None and found.scale_exact_match is not None), None)
    if not inputs:
        observation = "none"
    if exact is None or exact.scale_exact_match is None or observation != "own":
        return pattern_annotator(label, pattern, inputs=inputs, weights=axes, observation=observation)
    qparams = (exact.scale_exact_match, exact.zero_point_exact_match or 0)
    return pattern_annotator(label, pattern, inputs=inputs, weights=axes, observation="fixed", qparams=qparams)


def _roles(name: str, entry: PatternEntry) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the operands of an operator that are activations and those that are weights."""
    operands = list(arguments(name))
    roles: dict[str, str] = {role: role for role in ("weight", "bias") if role in operands}
    for role, position in entry.input_type_to_index.items():
        if position >= len(operands):
            raise ConfigError(
                f"Pattern {entry.text} has its {role} at argument {position}, but its operator has only {operands}."
            )
        roles.setdefault(role, operands[position])
    weights = (roles["weight"],) if "weight" in roles else ()
    others = (*weights, roles.get("bias"))
    # The indices of an embedding are integers already.
    inputs = () if name.startswith("embedding") else tuple(t for t in _tensors(name) if t not in others)
    return inputs, weights


def _input(name: str, operand: str) -> Pattern:
    return value(operand) if arguments(name)[operand] == "Tensor" else each(value(), operand)


def _number(found: Any) -> str | None:
    return None if isinstance(found, Number) else f"{found} is no number"
