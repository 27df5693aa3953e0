"""Training and evaluation mode of exported graphs.

Before: a graph module whose operators carry the mode that it was exported in. After: the same module,
whose `train()` and `eval()` set that operand on every operator that has one (dropout of every kind, batch
and instance norm, recurrent layers, rrelu), the attention's dropout, and the counting of batches. Rates,
eps and momentum stay what they were; a Python branch on `self.training` was decided at export.
"""

from functools import cache
from typing import Any, TypeVar

import torch
from torch import fx

from quantplug.core.errors import ModelError
from quantplug.core.graph.editing import set_operand
from quantplug.core.graph.facts import describe, is_batch_counter, operands
from quantplug.core.graph.lazy import LazyGraphModule
from quantplug.core.graph.meta import DROPOUT
from quantplug.core.graph.operators import operator_overloads
from quantplug.core.peers.torch_names import OpOverload, schema_of

# How ATen's schemas call the operand that says "this is training".
_MODE_OPERANDS = ("train", "training", "use_input_stats")
_INFERENCE_ONLY = operator_overloads("_native_batch_norm_legit_no_training")
_BATCH_ONLY = torch.ops.aten._native_batch_norm_legit.no_stats
_ATTENTION = operator_overloads("scaled_dot_product_attention")

Self = TypeVar("Self", bound="SwitchableGraphModule")


class SwitchableGraphModule(LazyGraphModule):
    """A graph module whose `train()` and `eval()` change what its operators do.

    It is a class, not a pair of methods set on an instance, because `copy.deepcopy` of a graph module
    keeps its class and drops what was set on the instance.
    """

    def train(self: Self, mode: bool = True) -> Self:
        """Moves the module, and the submodels of its control flow, to training or evaluation mode.

        Raises:
            ModelError: training is asked for, but the graph was decomposed for inference; nothing is changed.
        """
        models = [part for part in self.modules() if isinstance(part, fx.GraphModule)]
        if mode:
            _require_trainable(models)
        for model in models:
            switched = [_switch(node, mode) for node in model.graph.nodes]
            if any(switched):
                model.recompile()
        return super().train(mode)


def _require_trainable(models: list[fx.GraphModule]) -> None:
    for node in (n for model in models for n in model.graph.nodes if n.target in _INFERENCE_ONLY):
        raise ModelError(
            f"{describe(node)} was decomposed for inference and cannot be trained; export the model without "
            "run_decompositions() before it is prepared for training."
        )


def _switch(node: fx.Node, training: bool) -> bool:
    """Sets the mode of one operator; returns whether that changed anything."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target in _ATTENTION:
        rate = _attention_rate(node)
        return _set(node, "dropout_p", rate if training else 0.0)
    if node.target is torch.ops.aten.add_.Tensor and is_batch_counter(node.args[0]):
        # Batches are counted in training only: elsewhere the counter would change at inference.
        return _set(node, "other", int(training))
    name = _mode_operand(node.target)
    return name is not None and _set(node, name, training or _lives_on_batches(node))


@cache
def _mode_operand(target: OpOverload) -> str | None:
    """Returns the name of an operator's operand that says "this is training", or None if it has none."""
    names = {argument.name for argument in schema_of(target).arguments}
    return next((n for n in _MODE_OPERANDS if n in names), None)


def _attention_rate(node: fx.Node) -> float:
    """Returns the dropout rate that attention was exported with; it is remembered while it is off."""
    rate = DROPOUT.get(node, operands(node)["dropout_p"])
    DROPOUT.put(node, rate)
    return rate


def _lives_on_batches(node: fx.Node) -> bool:
    """Tells whether a norm has no running statistics, so that it uses the batch's in either mode."""
    given = operands(node)
    # torch 2.13 crashes on this overload outside of training: it has no statistics to fall back on
    return node.target is _BATCH_ONLY or ("running_mean" in given and given["running_mean"] is None)


def _set(node: fx.Node, name: str, value: Any) -> bool:
    if operands(node)[name] == value:
        return False
    set_operand(node, name, value)
    return True
