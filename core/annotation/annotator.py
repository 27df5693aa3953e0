"""Annotators: how one operator family is quantized, as a value.

An annotator is pure: it says what it would do with a match. `quantplug.core.annotation.engine` carries it out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import fx, nn
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationConfig

from quantplug.core.errors import ConfigError, PatternError
from quantplug.core.patterns.language import AnyOp, Match, Op, Pattern
from quantplug.core.patterns.matching import Found
from quantplug.core.specs.dtypes import DTypeConfig
from quantplug.core.specs.levels import Level
from quantplug.core.specs.limits import Pairs, Rescale

Annotations: TypeAlias = dict[fx.Node, QuantizationAnnotation]
Decide: TypeAlias = Callable[[Match, QuantizationConfig], Annotations]
Constraint: TypeAlias = Callable[[Match, QuantizationConfig], str | None]
Filter: TypeAlias = Callable[[fx.Node], bool]


@dataclass(frozen=True)
class Choice:
    """The config that applies to a node.

    Attributes:
        config: the config, or None for float.
        scope: which scope chose it, in words ("" if none covers the node).
        precedence: how specific that scope is; 0 if none covers the node.
        is_named: whether the scope names the node's operator, type or module; it is obeyed then even where the
            backend would rather leave the node float.
    """

    config: QuantizationConfig | None = None
    scope: str = ""
    precedence: int = 0
    is_named: bool = False


# Where the scale of an output comes from.
OUTPUTS = ("own", "shared", "fixed", "float")


@dataclass(frozen=True)
class Annotator:
    """How one operator family is quantized.

    Attributes:
        name: the family, as reports show it.
        patterns: (label, pattern) pairs; every pattern binds the operator that the family is about to "op".
        decide: the pure function from a match and a config to annotations.
        constraints: predicates over a match and a config, each None or the reason against it.
        follows: names of captures whose producers must already be quantized: an operator that only
            moves data keeps the integer domain between quantized neighbours and starts none.
        output: where the scale of the output comes from: an observer of its "own", "shared" with the
            input, "fixed" beforehand, or none because the output stays "float". It describes `decide`
            in capability tables.
        writes_float: whether the kernel can as well write float. Then its output is quantized only where
            a quantized operator reads it: rounding it for a float reader would cost accuracy and time. An
            operator whose output shares its input's scale is then not quantized at all.
        adds: names of captures that the kernel adds to its result, as integers or, where it writes float, in float:
            rounding such a summand then gains nothing.
        needs_company: whether the operator is left float where only float operators read its result: its
            integer kernel alone gains nothing.
        least_share: the share of the model's multiplications below which the operator is left float where it is the
            first or the last of the model and nothing beside it is quantized: its rounding reaches every result.
        dtypes: the dtype configs that the kernel runs, in the order of preference; empty for any.
        rescale: the ratios of scales that the kernel's requantization can express; None for any.
        pairs: how large the sum of two neighbouring products may get; None for any.
        level: how closely the kernel agrees with the q/dq graph.
        examples: functions without arguments that return a module and its example inputs, for rules whose
            operators a conformance kit does not know.
    """

    name: str
    patterns: tuple[tuple[str, Pattern], ...]
    decide: Decide
    constraints: tuple[Constraint, ...] = ()
    follows: tuple[str, ...] = ()
    output: str = "own"
    writes_float: bool = False
    adds: tuple[str, ...] = ()
    needs_company: bool = False
    least_share: float = 0.0
    dtypes: tuple[DTypeConfig, ...] = ()
    rescale: Rescale | None = None
    pairs: Pairs | None = None
    level: Level = Level.ONE_STEP
    examples: tuple[Callable[[], tuple[nn.Module, tuple[Any, ...]]], ...] = ()

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise ConfigError(f"Annotator '{self.name}' has output '{self.output}'; choose one of {list(OUTPUTS)}.")
        if not isinstance(self.level, Level):
            raise ConfigError(f"Annotator '{self.name}' has level {self.level!r}; choose one of {list(Level)}.")
        for what, functions in (("constraint", self.constraints), ("example", self.examples)):
            wrong = next((found for found in functions if not callable(found)), None)
            if wrong is not None:
                raise ConfigError(f"Annotator '{self.name}' has the {what} {wrong!r}; give a function.")
        for label, pattern in self.patterns:
            if "op" not in _bound_names(pattern):
                raise PatternError(
                    f"Pattern '{label}' of annotator '{self.name}' binds no operator to 'op'; "
                    "give the operator that the family is about name='op'."
                )

    def where(self, *constraints: Constraint) -> "Annotator":
        """Returns the same annotator with further constraints, each None or the reason against a match."""
        return replace(self, constraints=self.constraints + constraints)

    def writing_float(self) -> "Annotator":
        """Returns the same annotator for kernels that can as well write float."""
        return replace(self, writes_float=True)

    def needing_company(self) -> "Annotator":
        """Returns the same annotator for operators that gain nothing by themselves."""
        return replace(self, needs_company=True)

    def sparing_ends(self, least_share: float) -> "Annotator":
        """Returns the same annotator, which leaves small operators at the ends of a model float.

        Args:
            least_share: of the model's multiplications, see the attribute.
        """
        return replace(self, least_share=least_share)

    def accepting(self, *dtypes: DTypeConfig) -> "Annotator":
        """Returns the same annotator for kernels of these dtype configs only, the preferred one first."""
        return replace(self, dtypes=dtypes)

    def rescaling(self, low: float, high: float, of: str = "product", *, or_float: bool = False) -> "Annotator":
        """Returns the same annotator for kernels whose requantization expresses ratios of scales in [low, high).

        Args:
            low: the least ratio.
            high: the first ratio that is too great.
            of: "product" for (s_in * s_w) / s_out, "each" for s_in / s_out of each input.
            or_float: whether the lowering computes what lies outside in float, which reports tell; an error if not.
        """
        return self.held_to(Rescale(low, high, of, or_float))

    def held_to(self, limit: Rescale) -> "Annotator":
        """Returns the same annotator for kernels with a limit on ratios of scales that others read as well."""
        return replace(self, rescale=limit)

    def adding_pairs(self, limit: Pairs) -> "Annotator":
        """Returns the same annotator for kernels that add two products in fewer bits than the rest of a sum."""
        return replace(self, pairs=limit)

    def within(self, level: Level) -> "Annotator":
        """Returns the same annotator for kernels that agree with the q/dq graph up to a level."""
        return replace(self, level=level)

    def shown_by(self, *examples: Callable[[], tuple[nn.Module, tuple[Any, ...]]]) -> "Annotator":
        """Returns the same annotator with examples of what it matches, each a function to (module, inputs)."""
        return replace(self, examples=self.examples + examples)

    def __call__(self, match: Match, config: QuantizationConfig) -> Annotations:
        """Decides about one match; nothing is written. `annotate_with` annotates a graph.

        Args:
            match: of one of the patterns.
            config: what to quantize to.

        Raises:
            ConfigError: it is given a graph.
        """
        if not isinstance(match, Match):
            raise ConfigError(
                f"Annotator '{self.name}' decides about a match, found {type(match).__name__}; annotate a graph with "
                "`quantplug.plugin.annotate_with(model, [annotator], config)`."
            )
        return self.decide(match, config)


Piece: TypeAlias = Found[Annotator]


def _bound_names(pattern: Pattern) -> set[str]:
    own = {pattern.name} if isinstance(pattern, AnyOp | Op) and pattern.name else set()
    return own.union(*(_bound_names(part) for part in pattern.parts))
