"""The engine that a user asked for, by name or by how fast it is here.

Before: a declaration with engines, and what was asked for: a name, "auto", several names, or one for each module.
After: the program of that engine, of the fastest, or of several that follow one another.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from quantplug.core.errors import ConfigError, LoweringError, did_you_mean
from quantplug.core.graph.facts import describe
from quantplug.core.named import resolved
from quantplug.quantizers.framework.engines import AUTO, Asked, Engine
from quantplug.quantizers.framework.scopes import Scopes

if TYPE_CHECKING:  # a lowering imports its runtime, so that none is imported before it is used
    from quantplug.lowering.fastest import Candidate
    from quantplug.lowering.program import Program


def chosen_names(backend: str, engines: Mapping[str, Engine], asked: Asked) -> tuple[str, ...]:
    """Returns the names of the engines that were asked for.

    Raises:
        ConfigError: the backend has none, or none of such a name.
    """
    if not engines:
        raise ConfigError(f"Backend '{backend}' has one engine only; leave engine out.")
    if asked == AUTO:
        return tuple(engines)
    several = asked.values() if isinstance(asked, Mapping) else asked if isinstance(asked, list | tuple) else (asked,)
    known = list(engines) if isinstance(asked, Mapping) else [AUTO, *engines]
    wrong = next((name for name in several if name not in engines), None) if several else "nothing"
    if wrong is not None:
        hint = did_you_mean(wrong, known) if isinstance(wrong, str) else ""
        raise ConfigError(
            f"Backend '{backend}' has no engine '{wrong}'{hint}; choose one of {known}, several in a list, or one for "
            "each module path in a dict."
        )
    return tuple(dict.fromkeys(several))


def require_engine(backend: str, engines: Mapping[str, Engine], asked: Asked, options: Iterable[str]) -> None:
    """Makes sure that the engines that were asked for are there and take the options.

    Raises:
        ConfigError: there is no such engine, or none of them has such an option.
        LoweringError: the one that was asked for is not installed.
    """
    names = chosen_names(backend, engines, asked)
    is_named = isinstance(asked, Mapping) or (isinstance(asked, str) and asked != AUTO)
    for name in names if is_named else ():
        _require_installed(name, engines[name])
    known: list[str] = [] if is_named else ["remember", "time_anew"]
    for name in names:
        if engines[name].objection(name) is None:
            known += (option for option in _options(engines[name]) if option not in known)
    unknown = next((option for option in options if option not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"Engine {asked!r} has no option '{unknown}'{did_you_mean(unknown, known)}; choose from {known}."
        )


def lowered_by(
    backend: str,
    engines: Mapping[str, Engine],
    asked: Asked,
    model: fx.GraphModule,
    inputs: tuple[Any, ...],
    options: Mapping[str, Any],
) -> "Program":
    """Returns the program of the engine that was asked for, or of the fastest of several.

    Args:
        backend: whose engines they are.
        engines: those that it declares.
        asked: a name, "auto" for all, several names, or the names of modules' engines by path.
        model: the q/dq graph.
        inputs: example inputs, by position.
        options: of the lowerings; `remember` and `time_anew` of the choice.

    Raises:
        ConfigError: there is no such engine, or none of them has such an option.
        LoweringError: the engine is not installed, or does not run the graph.
    """
    require_engine(backend, engines, asked, options)
    if isinstance(asked, str) and asked != AUTO:
        return _lowered(engines[asked], asked, model, inputs, options)
    if isinstance(asked, Mapping):
        return _joined(engines, asked, model, inputs, options)
    from quantplug.lowering import remembered
    from quantplug.lowering.fastest import fastest
    from quantplug.lowering.processor import float_dtypes

    given = dict(options)
    remember, anew = given.pop("remember", None), given.pop("time_anew", False)
    dtypes = float_dtypes(given.pop("float_dtype", None))

    def lower(engine: Engine, name: str, **more: Any) -> "Program":
        return _lowered(engine, name, model, inputs, {**given, **more})

    candidates = _candidates(chosen_names(backend, engines, asked), engines, dtypes, lower)
    asked_for = {name: value for name, value in given.items() if name != "dynamic_shapes"}  # the graph has them
    is_on = remembered.is_on() if remember is None else remember
    return fastest(model, inputs, candidates, asked_for, remember=is_on, time_anew=anew)


def _joined(
    engines: Mapping[str, Engine],
    asked: Mapping[str, str],
    model: fx.GraphModule,
    inputs: tuple[Any, ...],
    options: Mapping[str, Any],
) -> "Program":
    """Returns the program in which each module runs on its engine."""
    from quantplug.lowering.joined import lower_joined

    scopes = {path: _below(path) for path in asked}
    silent = [sentence for found in scopes.values() for sentence in found.unmatched(model)]
    if silent:
        raise ConfigError(f"An engine is asked for and {silent[0]}; correct the path.")

    def engine_of(node: fx.Node) -> str:
        path = max(scopes, key=lambda path: scopes[path].choose(node).precedence)
        if path and not scopes[path].choose(node).precedence:
            raise ConfigError(
                f"No engine is asked for {describe(node)}; add one for '', which is the rest of the model."
            )
        return asked[path]

    given = {name: value for name, value in options.items() if name != "dynamic_shapes"}  # the graph has them

    def lower(engine: str, piece: fx.GraphModule, values: tuple[Any, ...]) -> "Program":
        return _lowered(engines[engine], engine, piece, values, given)

    return lower_joined(model, inputs, engine_of, lower)


def _below(path: str) -> Scopes:
    """Returns a scope that covers what lies below a module path or pattern; of the whole model none does."""
    found = Scopes()
    if path:
        found.set_module_name(path, None)
    return found


def _lowered(
    engine: Engine, name: str, model: fx.GraphModule, inputs: tuple[Any, ...], options: Mapping[str, Any]
) -> "Program":
    """Returns the program of one engine.

    Raises:
        ConfigError: it has no such option.
        LoweringError: it is not installed, or does not run the graph.
    """
    _require_installed(name, engine)
    lacking = next((option for option in options if option not in _options(engine)), None)
    if lacking is not None:
        raise ConfigError(f"Engine '{name}' has no option '{lacking}'.")
    program: Program = _lowering(engine)(model, inputs, **options)
    return program


def _require_installed(name: str, engine: Engine) -> None:
    reason = engine.objection(name)
    if reason is not None:
        raise LoweringError(reason)


def _lowering(engine: Engine) -> Any:
    return resolved(engine.lowering, f"lowering '{engine.lowering}'")


def _options(engine: Engine) -> list[str]:
    return list(inspect.signature(_lowering(engine)).parameters)[2:]


def _takes(engine: Engine, name: str, option: str) -> bool:
    return engine.objection(name) is None and option in _options(engine)


def _candidates(
    names: Iterable[str],
    engines: Mapping[str, Engine],
    dtypes: Sequence[torch.dtype],
    lower: Callable[..., "Program"],
) -> "list[Candidate]":
    """Returns what is timed: every engine in float32, then those that compute floats in bfloat16 too.

    Args:
        names: of the engines.
        engines: those that the backend declares.
        dtypes: what products that stay float may compute in; of several, an engine is asked only those that it has.
        lower: from an engine and its name to its program, with options.
    """
    from quantplug.lowering.fastest import Candidate

    found = []
    for dtype in dtypes:
        for name in names:
            engine, is_own = engines[name], dtype == torch.float32
            if not is_own and len(dtypes) > 1 and not _takes(engine, name, "float_dtype"):
                continue
            option = {} if is_own else {"float_dtype": dtype}
            written = str(dtype).removeprefix("torch.")
            is_for_products = engine.halves_products_alone and not is_own
            found.append(
                Candidate(name, partial(lower, engine, name, **option), written, engine.needs, is_for_products)
            )
    return found
