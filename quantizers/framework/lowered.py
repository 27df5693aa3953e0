"""From a declaration to programs: its lowering found by its name, called with what every lowering is given."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, fx

from quantplug.core.errors import ConfigError, did_you_mean
from quantplug.core.graph.calling import by_position, in_order, input_names
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.named import resolved
from quantplug.core.peers.torch_names import pytree

if TYPE_CHECKING:  # declaring a backend imports no lowering
    from quantplug.lowering.emulation import EmulatedProgram, KernelSet

Lowering: TypeAlias = Callable[..., Any]  # of a Program, whose room a declaration does not import
Keywords: TypeAlias = Mapping[str, Any] | None


def lowering_of(backend: str, declared: str | Lowering) -> Lowering:
    """Returns the function that a backend declares as its lowering.

    Raises:
        ConfigError: its name leads nowhere.
    """
    if not isinstance(declared, str):
        return declared
    found: Lowering = resolved(declared, f"lowering '{declared}' of backend '{backend}'")
    return found


def require_options(backend: str, lowering: Lowering, names: Iterable[str]) -> None:
    """Raises ConfigError where a lowering has no option of such a name."""
    parameters = list(inspect.signature(lowering).parameters.values())[2:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"The lowering of backend '{backend}' has no option '{name}'{did_you_mean(name, known)}; "
                f"choose from {known}."
            )


def lowered(
    lowering: Lowering, converted: fx.GraphModule, inputs: tuple[Any, ...], keywords: Keywords, options: dict[str, Any]
) -> Any:
    """Returns the program that a lowering makes of a q/dq graph and example inputs."""
    model, positional = _positional(converted, inputs, keywords)
    # A slice of a data set would take the whole data set along into a saved program.
    own = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), positional)
    return lowering(model, own, **options)


def emulated(
    kernels: "str | KernelSet",
    converted: fx.GraphModule,
    inputs: tuple[Any, ...],
    keywords: Keywords,
    options: dict[str, Any],
) -> "EmulatedProgram":
    """Returns the program that computes what kernels compute on a q/dq graph and example inputs."""
    from quantplug.lowering.emulation import emulate, kernel_set

    found = kernel_set(kernels)
    model, positional = _positional(converted, inputs, keywords)
    return emulate(model, positional, found, **options)


def _positional(converted: fx.GraphModule, inputs: tuple[Any, ...], keywords: Keywords) -> tuple[fx.GraphModule, Any]:
    """Returns a graph and inputs in the only form that lowerings know: all by position."""
    model = by_position(require_graph_module(converted, "lower"))
    return model, in_order(input_names(model), inputs, keywords) if keywords else inputs
