"""Which engine was the fastest for a graph on this machine, kept in the user's cache folder.

Before: a q/dq graph, example inputs and the engines. After: a key of all that times depend on, and under it the times
of an earlier call. What a graph computes with (scales, weights) is not in the key, since it changes no time. The file
leads to a candidate by name, whose program is held against the q/dq graph like any other.
"""

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import ArtefactError, QuantplugWarning, first_line
from quantplug.core.files.typed import typed
from quantplug.core.files.whole import write_content
from quantplug.core.graph.facts import attribute, operands, operator_name
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.nodes import is_qdq
from quantplug.core.report.engines import EngineTime, EngineTimes

VERSION = 1
SWITCH = "QUANTPLUG_REMEMBER"


@dataclass(frozen=True)
class _Written:
    """Times as they stand in a file."""

    version: int
    rows: tuple[EngineTime, ...]
    chosen: int
    inputs: str
    threads: int


def is_on() -> bool:
    """Tells whether choices are remembered where nobody says otherwise."""
    return os.environ.get(SWITCH, "1").lower() not in ("0", "no", "off", "false")


def folder() -> Path:
    """Returns the folder of the choices, which need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "quantplug" / "engines"


def key_of(graph: fx.GraphModule, inputs: tuple[Any, ...], packages: Iterable[str], asked: Mapping[str, Any]) -> str:
    """Returns a name of all that the times of engines depend on.

    Args:
        graph: the q/dq graph.
        inputs: example inputs.
        packages: the distributions whose versions count beside torch's and ours.
        asked: the candidates and options.
    """
    told = [f"{VERSION}", *map(_version, sorted({"torch", "quantplug", *packages})), *_machine()]
    told += [f"{name}={asked[name]!r}" for name in sorted(asked)]
    told += map(_size, pytree.tree_leaves(inputs))
    return hashlib.sha256("\n".join([*told, *_structure(graph)]).encode()).hexdigest()[:32]


def recall(key: str) -> EngineTimes | None:
    """Returns the times that were kept under a key; None where there are none that can be read."""
    path = _path(key)
    try:
        content = path.read_bytes()
    except OSError:  # there is none
        return None
    try:
        found = json.loads(content)
        if isinstance(found, dict) and found.get("version") != VERSION:
            return None
        kept: _Written = typed(found, _Written, "the choice")
        if kept.chosen not in range(len(kept.rows)):
            raise ValueError(f"row {kept.chosen} of {len(kept.rows)} was chosen")
    except (ValueError, RecursionError) as error:
        warnings.warn(
            f"What '{path}' remembers of engines cannot be read ({first_line(error)}); they are timed anew.",
            QuantplugWarning,
            stacklevel=2,
        )
        return None
    return EngineTimes(kept.rows, kept.chosen, kept.inputs, kept.threads, is_remembered=True)


def keep(key: str, times: EngineTimes) -> None:
    """Writes times under a key, whole or not at all; warns where they cannot be written."""
    path = _path(key)
    written = {**asdict(_Written(VERSION, times.rows, times.chosen, times.inputs, times.threads))}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_content(path, json.dumps(written, indent=1).encode())
    except (OSError, ArtefactError) as error:
        warnings.warn(
            f"The choice of an engine is not remembered: {first_line(error)}; set XDG_CACHE_HOME to a folder that can "
            f"be written to, or {SWITCH}=0.",
            QuantplugWarning,
            stacklevel=2,
        )


def _path(key: str) -> Path:
    return folder() / f"{key}.json"


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} is not there"


def _machine() -> Iterator[str]:
    yield json.dumps(torch.cpu.get_capabilities(), sort_keys=True, default=str)
    yield f"{platform.system()} {platform.machine()} {torch.get_num_threads()} {os.cpu_count()}"
    yield os.environ.get("ONEDNN_MAX_CPU_ISA", "")


def _size(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)} {leaf.stride()}" if isinstance(leaf, Tensor) else repr(type(leaf))


def _structure(module: fx.GraphModule) -> Iterator[str]:
    """Yields a line for each node; names of nodes and of attributes, scales and zero points do not count."""
    places: dict[fx.Node, int] = {}
    for place, node in enumerate(module.graph.nodes):
        places[node] = place
        if node.op == "get_attr":
            yield from _held(attribute(module, str(node.target)))
        elif node.op == "placeholder":
            value = node.meta.get("val")
            yield f"{value.dtype} {tuple(map(str, value.shape))}" if isinstance(value, Tensor) else repr(value)
        else:
            yield f"{_called(node)} {_arguments(node, places)}"


def _held(value: Any) -> Iterator[str]:
    if isinstance(value, fx.GraphModule):
        yield from _structure(value)
    else:
        yield _size(value)


def _called(node: fx.Node) -> str:
    return f"{node.op} {operator_name(node)} {getattr(node.target, '__name__', node.target)}"


def _arguments(node: fx.Node, places: Mapping[fx.Node, int]) -> str:
    given: Any = (node.args, node.kwargs)
    if is_qdq(node):
        found = operands(node)
        zero = found.pop("zero_point", 0)
        given = {name: value for name, value in found.items() if name != "scale"}
        given["symmetric"] = zero if isinstance(zero, fx.Node) else zero == 0
    return repr(fx.node.map_arg(given, lambda source: f"%{places[source]}"))
