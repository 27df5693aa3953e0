"""Recipes: algorithms one after the other, each on the graph that it is for.

Before: what a user asks for, a list of algorithms or the name of one. After: algorithms in an order that makes sense.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol, TypeGuard, runtime_checkable

from torch import fx
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.algorithms.equalize import Equalize
from quantplug.algorithms.gptq import GPTQ
from quantplug.algorithms.rotate import Rotate
from quantplug.algorithms.smooth import Smooth
from quantplug.core.calibration.bias_correction import SAMPLES, BiasCorrection, correct_biases
from quantplug.core.calibration.progress import bars
from quantplug.core.errors import ConfigError

# The graphs that algorithms are for, in the order in which a model becomes them.
STAGES = {
    "float": "the exported float graph",
    "calibrated": "the calibrated graph",
    "rounded": "the calibrated graph, whose weights stay as they are from then on",
}


@runtime_checkable
class Algorithm(Protocol):
    """What makes a quantized model lose less; any object with these two is one.

    Attributes:
        stage: which graph it is for, of `STAGES`: "float", "calibrated", or "rounded", which is "calibrated" after
            all that changes weights.
    """

    @property
    def stage(self) -> str:
        """Which graph it is for."""

    def apply(
        self, model: fx.GraphModule, loader: Iterable[Any], *, inputs: Callable[[Any], Any] | None = None
    ) -> object:
        """Changes the graph in place and returns what was done, which `str` tells in a sentence.

        Args:
            model: the graph of its stage.
            loader: batches as for `calibrate`.
            inputs: picks the model's inputs out of a batch.
        """


@dataclass(frozen=True)
class CorrectBiases:
    """Lets biases undo the mean error of quantization (Nagel et al., arXiv:1906.04721, 4.2); see `correct_biases`.

    Attributes:
        samples: batches are taken until they hold so many samples, but two at least.
        stage: which graph it is for.
    """

    samples: int = SAMPLES
    stage: ClassVar[str] = "rounded"

    def apply(
        self, model: fx.GraphModule, loader: Iterable[Any], *, inputs: Callable[[Any], Any] | None = None
    ) -> BiasCorrection:
        """Corrects biases of a calibrated model; errors are those of `correct_biases`.

        Args:
            model: a calibrated graph.
            loader: batches as for `calibrate`.
            inputs: takes a batch and returns the model's inputs, as for `calibrate`.
        """
        return correct_biases(model, loader, self.samples, inputs=inputs)


RECIPES: dict[str, tuple[Algorithm, ...]] = {
    "fast": (CorrectBiases(),),
    "accurate": (
        Rotate(samples=32, few_bits=True, before_gptq=True),
        Equalize(before_gptq=True),
        Smooth(before_gptq=True),
        GPTQ(samples=256),
        CorrectBiases(),
    ),
}


def recipe_of(given: str | Sequence[Algorithm]) -> tuple[Algorithm, ...]:
    """Returns the algorithms of a recipe.

    Args:
        given: them, or the name of one of `RECIPES`.

    Raises:
        ConfigError: it is no recipe, or an algorithm stands behind one that is for a later graph.
    """
    if isinstance(given, str):
        if given not in RECIPES:
            raise ConfigError(f"There is no recipe '{given}'; choose one of {list(RECIPES)} or pass a list.")
        return RECIPES[given]
    if not _is_recipe(given):
        raise ConfigError(
            f"A recipe is a list of algorithms such as [GPTQ()], or a name of {list(RECIPES)}, found {given!r}; leave "
            "it out for none."
        )
    for before, after in pairwise(given):
        _require_order(before, after)
    return tuple(given)


def _require_order(before: Algorithm, after: Algorithm) -> None:
    order = list(STAGES)
    if order.index(after.stage) < order.index(before.stage):
        raise ConfigError(
            f"{type(after).__name__} changes {STAGES[after.stage]}, and stands behind {type(before).__name__}, which "
            f"is for {STAGES[before.stage]}; put it first."
        )


def _is_recipe(given: Any) -> TypeGuard[Sequence[Algorithm]]:
    return isinstance(given, Sequence) and all(
        isinstance(part, Algorithm) and not isinstance(part, type) and part.stage in STAGES for part in given
    )


def apply(
    algorithms: Sequence[Algorithm],
    graph: fx.GraphModule,
    loader: Any,
    inputs: Callable[[Any], Any] | None,
    quantizer: Quantizer,
    *,
    progress: bool,
) -> list[object]:
    """Applies algorithms to the graph of their stage, in order, and returns what each did.

    Args:
        algorithms: of one stage; one with a method `for_quantizer` is asked for one that knows the quantizer.
        graph: of this stage.
        loader: batches as for `calibrate`.
        inputs: picks the model's inputs out of a batch.
        quantizer: that the graph is prepared for.
        progress: whether bars are shown.
    """
    with bars(shown=progress):
        return [_knowing(each, quantizer).apply(graph, loader, inputs=inputs) for each in algorithms]


def _knowing(algorithm: Algorithm, quantizer: Quantizer) -> Algorithm:
    knows = getattr(algorithm, "for_quantizer", None)
    return algorithm if knows is None else knows(quantizer)


def by_stage(algorithms: Sequence[Algorithm]) -> tuple[list[Algorithm], list[Algorithm]]:
    """Returns the algorithms for the float graph, and those for the calibrated one."""
    floats = [each for each in algorithms if each.stage == "float"]
    return floats, list(algorithms[len(floats) :])
