"""From a declaration to programs: its lowering found by its name, called with what every lowering is given."""

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, fx

from quantplug.core.errors import ConfigError, did_you_mean
from quantplug.core.graph.calling import by_position, in_order, input_names
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.named import resolved
from quantplug.core.peers.torch_names import pytree

if TYPE_CHECKING:  # a lowering imports its runtime, so that none is imported before it is used
    from quantplug.lowering.emulation import EmulatedProgram, KernelSet
    from quantplug.lowering.program import Program
    from quantplug.quantizers.framework.backend import Lowering

Keywords: TypeAlias = Mapping[str, Any] | None


def lowering_with(options: Iterable[str], backend: str, declared: "str | Lowering") -> "Lowering":
    """Returns the function that a backend declares as its lowering.

    Raises:
        ConfigError: its name leads nowhere, or it has no such option.
    """
    what = f"lowering '{declared}' of backend '{backend}'"
    lowering: Lowering = resolved(declared, what) if isinstance(declared, str) else declared
    parameters = list(inspect.signature(lowering).parameters.values())[2:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return lowering
    known = [parameter.name for parameter in parameters]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"The lowering of backend '{backend}' has no option '{unknown}'{did_you_mean(unknown, known)}; "
            f"choose from {known}."
        )
    return lowering


def lowered(
    backend: str,
    declared: "str | Lowering",
    converted: fx.GraphModule,
    inputs: tuple[Any, ...],
    keywords: Keywords,
    options: dict[str, Any],
) -> "Program":
    """Returns the program that a backend's lowering makes of a q/dq graph and example inputs."""
    lowering = lowering_with(options, backend, declared)
    model, positional = _positional(converted, inputs, keywords)
    # A slice of a data set would take the whole data set along into a saved program.
    own = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), positional)
    program: Program = lowering(model, own, **options)
    return program


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
