"""A quantizer of anybody's, and how its q/dq graphs are lowered, to be judged by what it annotates.

Before: names such as "package.module:factory". After: a `Candidate`, which makes quantizers and programs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.core.errors import ConfigError, QuantplugError, first_line
from quantplug.core.named import resolved


@dataclass(frozen=True)
class Candidate:
    """A quantizer that declares nothing.

    Attributes:
        name: in the names of tests and verdicts.
        factory: returns a new quantizer, configured: its class, or a function without arguments.
        lowering: from a q/dq graph and its example inputs to what runs it, None to look at graphs alone.
        steps: how many steps of a result's scale the lowered program may be off its q/dq graph.
    """

    name: str
    factory: Callable[[], Any]
    lowering: Callable[[fx.GraphModule, tuple[Any, ...]], Callable[..., Any]] | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"steps is {self.steps}; a program may be off by 0 steps or more.")

    @classmethod
    def named(
        cls, quantizer: str, partitioners: Sequence[str] = (), lowering: str | None = None, steps: int = 1
    ) -> "Candidate":
        """Returns a candidate by names "package.module:attribute".

        Args:
            quantizer: the factory.
            partitioners: factories of ExecuTorch's partitioners, in their order.
            lowering: a function in their place.
            steps: how many steps of a result's scale the lowered program may be off its q/dq graph.

        Raises:
            ConfigError: a name leads nowhere, the factory raises or makes no quantizer, or there is a lowering beside
                partitioners.
        """
        if partitioners and lowering is not None:
            raise ConfigError(f"There are partitioners and the lowering '{lowering}'; give one of the two.")
        found: Any = resolved(lowering, f"lowering '{lowering}'") if lowering is not None else None
        if partitioners:
            from quantplug.conformance.partitioned import Partitioned

            made = [(name, resolved(name, f"partitioner '{name}'")) for name in partitioners]
            found = Partitioned(tuple(factory for _, factory in made))
            for name, factory in made:
                _made(factory, f"partitioner '{name}'")
        candidate = cls(quantizer.rpartition(":")[2], resolved(quantizer, f"quantizer '{quantizer}'"), found, steps)
        candidate.make()
        return candidate

    def make(self) -> Quantizer:
        """Returns a new quantizer.

        Raises:
            ConfigError: the factory raises, or makes something else.
        """
        made = _made(self.factory, f"quantizer '{self.name}'")
        if not isinstance(made, Quantizer):
            kind = type(made).__name__
            raise ConfigError(
                f"The factory of '{self.name}' makes a {kind}, no quantizer; give a class or function without "
                "arguments that returns a torchao.quantization.pt2e.quantizer.Quantizer."
            )
        return made


def _made(factory: Callable[[], Any], what: str) -> Any:
    if not callable(factory):
        raise ConfigError(f"The {what} is a {type(factory).__name__}; name a class or a function without arguments.")
    try:
        return factory()
    except QuantplugError as error:
        raise ConfigError(f"The {what} cannot be made: {error}") from error
    except Exception as error:  # a factory may fail in any way
        raise ConfigError(f"The {what} cannot be made ({first_line(error)}); mend its factory.") from error
