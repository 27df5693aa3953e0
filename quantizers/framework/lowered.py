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
from quantplug.quantizers.framework.engine_choice import lowered_by
from quantplug.quantizers.framework.engines import Asked

if TYPE_CHECKING:  # a lowering imports its runtime, so that none is imported before it is used
    from quantplug.lowering.emulation import EmulatedProgram
    from quantplug.lowering.program import Program
    from quantplug.quantizers.framework.backend import Backend, Lowering

Keywords: TypeAlias = Mapping[str, Any] | None


def lowering_with(backend: "Backend", options: Iterable[str]) -> "Lowering":
    """Returns the function that a backend declares as its lowering, which takes these options.

    Raises:
        ConfigError: its name leads nowhere, or it has no such option.
    """
    declared = backend.lowering
    what = f"lowering '{declared}' of backend '{backend.name}'"
    lowering: Lowering = resolved(declared, what) if isinstance(declared, str) else declared
    parameters = list(inspect.signature(lowering).parameters.values())[2:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return lowering
    known = [parameter.name for parameter in parameters]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"The lowering of backend '{backend.name}' has no option '{unknown}'{did_you_mean(unknown, known)}; "
            f"choose from {known}."
        )
    return lowering


def lowered(
    backend: "Backend",
    converted: fx.GraphModule,
    inputs: tuple[Any, ...],
    keywords: Keywords,
    options: dict[str, Any],
    engine: Asked | None = None,
) -> "Program":
    """Returns the program that a backend's lowering, or an engine, makes of a q/dq graph and example inputs."""
    backend.require_lowering_options(options, engine)
    model, positional = _positional(converted, inputs, keywords)
    # A slice of a data set would take the whole data set along into a saved program.
    own = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), positional)
    if engine is not None:
        return lowered_by(backend.name, backend.engines, engine, model, own, options)
    program: Program = lowering_with(backend, options)(model, own, **options)
    return program


def emulated(
    backend: "Backend", converted: fx.GraphModule, inputs: tuple[Any, ...], keywords: Keywords, options: dict[str, Any]
) -> "EmulatedProgram":
    """Returns the program that computes what a backend's kernels compute on a q/dq graph and example inputs.

    Raises:
        ConfigError: the backend names no kernels.
    """
    if backend.kernels is None:
        raise ConfigError(f"Backend '{backend.name}' names no kernels to emulate; declare kernels=KernelSet(...).")
    from quantplug.lowering.emulation import emulate, kernel_set

    found = kernel_set(backend.kernels)
    model, positional = _positional(converted, inputs, keywords)
    return emulate(model, positional, found, **options)


def _positional(converted: fx.GraphModule, inputs: tuple[Any, ...], keywords: Keywords) -> tuple[fx.GraphModule, Any]:
    """Returns a graph and inputs in the only form that lowerings know: all by position."""
    model = by_position(require_graph_module(converted, "lower"))
    return model, in_order(input_names(model), inputs, keywords) if keywords else inputs
