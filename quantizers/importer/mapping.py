"""torch.ao's `QConfigMapping` as the scopes of a quantizer.

The order is torch.ao's: the call of a type by its number, module name, regular expression, object type, global.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx, nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from quantplug.core.errors import ConfigError
from quantplug.core.graph.facts import compute_nodes, module_stack
from quantplug.core.graph.operators import operator_overloads
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.framework.scopes import Scope, module_paths
from quantplug.quantizers.importer.operators import NotApplicableError, function_name, sequence, targets
from quantplug.quantizers.importer.qconfig import from_qconfig, reuses_input

_KEYS = {
    "": "global_qconfig",
    "object_type": "object_type_qconfigs",
    "module_name_regex": "module_name_regex_qconfigs",
    "module_name": "module_name_qconfigs",
    "module_name_object_type_order": "module_name_object_type_order_qconfigs",
}


def from_qconfig_mapping(mapping: Any, backend: Backend, *, strict: bool = True) -> BackendQuantizer:
    """Returns the quantizer of a backend with the scopes of a `QConfigMapping`.

    Object types that a model does not have are no error: torch.ao's own mappings list many. Where a `QConfig` only
    says that an operator keeps the scale of its input, the rule of the backend says so already.

    Args:
        mapping: torch.ao's object, or a dictionary with its keys ("", "object_type", "module_name", ...).
        backend: such as `from_backend_config` returns.
        strict: whether a config that breaks a limit of the kernels, or a module name that is not there, is an error.

    Raises:
        ConfigError: an observer, an object type or a key is not understood.
    """
    settings = _settings(mapping)
    activation = _activation(settings["global_qconfig"], backend)
    quantizer = BackendQuantizer(strict=strict)
    quantizer.backend = backend
    quantizer.set_global(from_qconfig(settings["global_qconfig"], activation))
    for scope in _scopes(settings, activation):
        quantizer.scopes.add(scope)
    for name, qconfig in settings["module_name_qconfigs"].items():
        quantizer.set_module_name(name, from_qconfig(qconfig, activation))
    return quantizer


def _settings(mapping: Any) -> dict[str, Any]:
    if not isinstance(mapping, Mapping):
        if not hasattr(mapping, "object_type_qconfigs"):
            raise ConfigError(
                f"from_qconfig_mapping takes a QConfigMapping or a dictionary, found {type(mapping).__name__}."
            )
        return {name: getattr(mapping, name) for name in _KEYS.values()}
    unknown = next((key for key in mapping if key not in _KEYS), None)
    if unknown is not None:
        raise ConfigError(f"A qconfig mapping has the key {unknown!r}; choose from {list(_KEYS)}.")
    return {name: _pairs(mapping.get(key)) if key else mapping.get("") for key, name in _KEYS.items()}


def _pairs(listed: Any) -> dict[Any, Any]:
    """Returns the rows of a dictionary's list: the last of each is the QConfig, those before it are the key."""
    return {(row[0] if len(row) == 2 else tuple(row[:-1])): row[-1] for row in listed or ()}


def _activation(qconfig: Any, backend: Backend) -> QuantizationSpec | None:
    """Returns what observes the input of an operator whose output has fixed qparams."""
    config = from_qconfig(qconfig) or backend.config()
    return config.input_activation or backend.config().input_activation


def _scopes(settings: Mapping[str, Any], activation: QuantizationSpec | None) -> Iterator[Scope]:
    kinds = settings["object_type_qconfigs"]
    for kind, qconfig in kinds.items():
        if not reuses_input(qconfig):
            yield from _object_type(kind, from_qconfig(qconfig, activation))
    # The first expression that matches wins there, the later scope here.
    for pattern, qconfig in reversed(settings["module_name_regex_qconfigs"].items()):
        yield _regex(pattern, from_qconfig(qconfig, activation))
    for (path, kind, index), qconfig in settings["module_name_object_type_order_qconfigs"].items():
        yield _call(path, kind, index, from_qconfig(qconfig, activation))


def _object_type(kind: Any, config: QuantizationConfig | None) -> Iterator[Scope]:
    covers = _covers(kind)
    if covers is not None:
        name = "module type" if isinstance(kind, type) else "operator type"
        yield Scope(name, _text(kind), config, lambda node: int(covers(node)), lambda nodes: (), optional=True)


def _covers(kind: Any) -> Callable[[fx.Node], bool] | None:
    """Returns what tells the nodes of an object type, or None if an exported graph has none.

    Modules of torch.nn are leaves there: what they call is theirs, not that of a function's setting.
    """
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        wanted = f"{kind.__module__}.{kind.__qualname__}"
        return lambda node: _innermost(node)[1] == wanted
    if not callable(kind) and not isinstance(kind, str):
        raise ConfigError(
            f"A qconfig mapping has the object type {kind!r}; give a module class, a function or a method's name."
        )
    try:
        names = sequence(kind, {})
    except NotApplicableError:
        return None
    overloads = frozenset().union(*(operator_overloads(target) for target in targets(names[0])))
    return lambda node: node.target in overloads and not _is_leaf(_innermost(node)[1])


def _regex(pattern: str, config: QuantizationConfig | None) -> Scope:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"The module name pattern '{pattern}' is no regular expression: {error}.") from None

    def depth(node: fx.Node) -> int:
        return int(bool(compiled.match(_innermost(node)[0])))

    return Scope("module name pattern", pattern, config, depth, module_paths)


def _call(path: str, kind: Any, index: int, config: QuantizationConfig | None) -> Scope:
    covers = _covers(kind)
    numbers: WeakKeyDictionary[fx.Graph, dict[fx.Node, int]] = WeakKeyDictionary()

    def depth(node: fx.Node) -> int:
        if covers is None or not covers(node) or _parent(node) != path:
            return 0
        if node.graph not in numbers:
            numbers[node.graph] = _numbered(node.graph, covers)
        return int(numbers[node.graph].get(node) == index)

    return Scope("call", f"{index} of {_text(kind)} in '{path}'", config, depth, lambda nodes: ())


def _numbered(graph: fx.Graph, covers: Callable[[fx.Node], bool]) -> dict[fx.Node, int]:
    """Numbers the calls of an object type in each module; the nodes of one module call have one number."""
    numbers: dict[fx.Node, int] = {}
    calls: Counter[str] = Counter()
    before: tuple[str, str] | None = None
    for node in compute_nodes(graph):
        if not covers(node):
            continue
        call = _parent(node), _call_key(node)
        if call != before:
            calls[call[0]] += 1
        numbers[node] = calls[call[0]] - 1
        before = call
    return numbers


def _call_key(node: fx.Node) -> str:
    """What tells two calls apart: of a leaf module the key of its call, of a function the node."""
    return next(reversed(node.meta["nn_module_stack"])) if _is_leaf(_innermost(node)[1]) else node.name


def _parent(node: fx.Node) -> str:
    """Returns the module that makes the call: the parent of a leaf module, or where the function stands."""
    path, kind = _innermost(node)
    return path.rpartition(".")[0] if _is_leaf(kind) else path


def _innermost(node: fx.Node) -> tuple[str, str]:
    stack = module_stack(node)
    return stack[-1] if stack else ("", "")


def _is_leaf(kind: str) -> bool:
    """Tells the modules that FX graph mode does not look into: those of torch.nn except containers."""
    return kind.startswith(("torch.nn.", "torch.ao.nn.")) and not kind.startswith("torch.nn.modules.container.")


def _text(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else function_name(kind)
