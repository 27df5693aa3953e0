"""Bias correction: a calibrated model and batches -> biases for which quantized layers keep their float means.

Rounding weights to few bits shifts the mean of each output channel, and following layers add the shifts
up. Adding the difference of the means to the biases takes the shift away (Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721, section 4.2). A layer is
compared while all layers before it are corrected already, in one pass over the graph: all batches go
through a node before any goes on to the next.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantplug.core.batches import BatchReader, loader_iterator
from quantplug.core.convert import convert_pt2e
from quantplug.core.errors import CalibrationError
from quantplug.core.graph import attribute, operands
from quantplug.core.observation import is_observer
from quantplug.core.observers import DataObserver
from quantplug.core.sites import channel_axis, require_prepared


def correct_biases(prepared: fx.GraphModule, loader: Iterable[Any], limit: int = 4) -> dict[str, float]:
    """Gives a calibrated model's convolutions and linears biases that undo the mean error of quantization.

    Layers without a bias of their own are left alone.

    Args:
        prepared: a model that `calibrate` has run; its biases are replaced.
        loader: batches as for `calibrate`; their activations are in memory together.
        limit: at most so many batches.

    Returns:
        The largest change of each layer's bias, by the layer's node name.

    Raises:
        ModelError: `prepared` is not a prepared graph module.
        CalibrationError: it is not calibrated, the loader is empty, or a batch does not fit the model.
    """
    model = require_prepared(prepared, "correct_biases")
    reader = BatchReader(model)
    batches = [
        tuple(reader.arguments(batch, index).values())
        for index, batch in enumerate(islice(loader_iterator(loader), limit))
    ]
    if not batches:
        raise CalibrationError(
            f"No bias can be corrected: the loader yielded no batch (limit {limit}); pass at least one."
        )
    biases = _own_biases(model)
    with torch.no_grad():
        expected = {name: mean for name, mean, _ in _means(_FloatRun, model, batches, biases)}
        changes = {}
        for name, mean, runs in _means(fx.Interpreter, convert_pt2e(model), batches, biases):
            changes[name] = expected[name] - mean
            for run, node in runs:
                run.env[node] = run.env[node] + _along_channels(changes[name], run.env[node], node)
    for name, change in changes.items():
        _add(model, biases[name], change)
    return {name: float(change.abs().max()) for name, change in changes.items()}


def _own_biases(model: fx.GraphModule) -> dict[str, str]:
    """Returns {layer's node name: its bias's name} of biases that nothing else reads and no observer looks at."""
    readers = Counter(str(node.target) for node in model.graph.nodes if node.op == "get_attr" for _ in node.users)
    found = {}
    for node in model.graph.nodes:
        bias = operands(node).get("bias") if node.op == "call_function" and channel_axis(node) is not None else None
        if isinstance(bias, fx.Node) and bias.op == "call_module":
            observer = model.get_submodule(str(bias.target))
            bias = None if isinstance(observer, DataObserver) else bias.args[0]
        if isinstance(bias, fx.Node) and bias.op == "get_attr" and readers[str(bias.target)] == 1:
            found[node.name] = str(bias.target)
    return found


class _FloatRun(fx.Interpreter):
    """Runs a prepared model without its observers."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Passes on what reaches an observer."""
        if is_observer(self.fetch_attr(str(target))):
            return args[0]
        return super().call_module(target, args, kwargs)


_Run = tuple[fx.Interpreter, fx.Node]


def _means(
    kind: type[fx.Interpreter], model: fx.GraphModule, batches: list[tuple[Any, ...]], wanted: Iterable[str]
) -> Iterator[tuple[str, Tensor, list[_Run]]]:
    """Runs all batches node by node and yields each wanted node's name, channels' means and runs at it."""
    runs = [kind(model) for _ in batches]
    for run, batch in zip(runs, batches, strict=True):
        run.args_iter = iter(batch)
    for node in model.graph.nodes:
        if node.op == "output":
            return
        for run in runs:
            run.env[node] = run.run_node(node)
        if node.name in wanted:
            yield node.name, _mean([run.env[node] for run in runs], node), [(run, node) for run in runs]
        for run in runs:
            for used in run.user_to_last_uses.get(node, []):
                del run.env[used]


def _axis(node: fx.Node, value: Tensor) -> int:
    axis = channel_axis(node)
    assert axis is not None
    return axis % value.dim()


def _mean(values: list[Tensor], node: fx.Node) -> Tensor:
    axis = _axis(node, values[0])
    channels = [value.double().movedim(axis, 0).flatten(1) for value in values]
    return torch.cat(channels, 1).mean(1)


def _along_channels(change: Tensor, value: Tensor, node: fx.Node) -> Tensor:
    return change.to(value.dtype).view(-1, *[1] * (value.dim() - 1 - _axis(node, value)))


def _add(model: fx.GraphModule, name: str, change: Tensor) -> None:
    """Replaces a bias: the tensor itself may be the caller's."""
    before = attribute(model, name)
    owner, _, leaf = name.rpartition(".")
    after = nn.Parameter((before + change).to(before.dtype).detach(), requires_grad=before.requires_grad)
    setattr(model.get_submodule(owner), leaf, after)
