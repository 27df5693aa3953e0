"""The reference quantized model: what two of them compute, as comparable values.

Before: converted graph modules. After: the same modules, unchanged; what they have in common and what not.
"""

import hashlib
from collections import Counter
from typing import Any

import torch
from torch import fx

from quantplug.core.constants import written_buffers
from quantplug.core.graph import attribute


def structure(model: fx.GraphModule) -> tuple[Counter[str], str]:
    """Returns how often each operator call occurs, named by everything it depends on, and what the outputs are.

    Two graphs with equal structures compute the same values by the same calls; only the order of the
    nodes and the names of attributes may differ. Constants count by their content.
    """
    names: dict[fx.Node, str] = {}
    calls: Counter[str] = Counter()
    outputs = ""
    state = written_buffers(model.graph)
    for node in model.graph.nodes:
        if node.op == "placeholder":
            names[node] = f"input {node.target}"
        elif node.op == "get_attr":
            path = str(node.target)
            names[node] = f"state {path}" if path in state else _content(attribute(model, path))
        elif node.op == "call_function":
            names[node] = _digest(repr((str(node.target), _named(node.args, names), _named(node.kwargs, names))))
            calls[f"{node.target} {names[node]}"] += 1
        elif node.op == "output":
            outputs = repr(_named(node.args, names))
    return calls, outputs


def differences(ours: fx.GraphModule, theirs: fx.GraphModule) -> list[str]:
    """Returns what one graph has and the other has not, calls first."""
    (mine, my_outputs), (peer, peer_outputs) = structure(ours), structure(theirs)
    found = [f"only ours: {call}" for call in mine - peer] + [f"only theirs: {call}" for call in peer - mine]
    return found + (["other outputs"] if my_outputs != peer_outputs else [])


def _named(value: Any, names: dict[fx.Node, str]) -> Any:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        return [_named(v, names) for v in value]
    if isinstance(value, dict):
        return {k: _named(v, names) for k, v in sorted(value.items())}
    return value


def _content(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous()
        data = plain.view(torch.uint8) if plain.dim() else plain.reshape(1).view(torch.uint8)
        return _digest(f"{plain.dtype} {tuple(plain.shape)} {bytes(data.numpy().tobytes()).hex()}")
    if isinstance(value, fx.GraphModule):
        calls, outputs = structure(value)
        return _digest(repr((sorted(calls.items()), outputs)))
    return type(value).__name__


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()
