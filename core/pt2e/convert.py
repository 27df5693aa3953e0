"""Observers out: a calibrated or trained graph becomes the reference quantized model.

Before: a graph module from prepare, calibrated or trained. After: a graph module of its own in which
every observer is a quantize/dequantize pair, constants are stored as integers (or halves) with no float
copy beside them, and every consumer that a quantizer annotated reads a dequantize node of its own. The
prepared model stays as it was and can be calibrated further and converted again.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.batch_norms.training import fold_batch_norms_qat
from quantplug.core.errors import ConfigError, ConvertError
from quantplug.core.graph.control import run_as_operators
from quantplug.core.graph.editing import erase_dead_code
from quantplug.core.graph.facts import attribute, require_graph_module
from quantplug.core.graph.meta import FLOATS, PHASE
from quantplug.core.graph.phases import CONVERTED, PREPARED, phase_of
from quantplug.core.graph.submodels import lift_constants, submodel_targets
from quantplug.core.graph.working_copy import collection_paused, rebuilt, working_copy
from quantplug.core.pt2e.consumers import rewire
from quantplug.core.pt2e.numbers import Numbers, without_repeated
from quantplug.core.pt2e.observed import calls_of_observers, observe_constants, require_data
from quantplug.core.pt2e.pairs import write_pairs
from quantplug.core.qdq.arithmetic import integer_representation
from quantplug.core.qdq.integer_io import apply_io_dtypes
from quantplug.core.qdq.limits import enforce_limits
from quantplug.core.qdq.nodes import is_dequantize


@torch.inference_mode(False)
def convert_pt2e(
    model: fx.GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
) -> fx.GraphModule:
    """Converts a prepared model that was calibrated or trained.

    Args:
        model: what `prepare_pt2e` or `prepare_qat_pt2e` returned, ours or torchao's; it is not changed.
        use_reference_representation: whether to replace float operators between q/dq by integer arithmetic.
        fold_quantize: whether constants are stored quantized; if not, their quantize nodes stay in the graph.

    Returns:
        The reference quantized model, in evaluation mode.

    Raises:
        ConvertError: the model is not prepared, or is converted already.
        CalibrationError: observers have not seen data, saw data that was not finite, or found numbers that
            break a limit of the backend's kernels.
    """
    _require_flags(use_reference_representation=use_reference_representation, fold_quantize=fold_quantize)
    _require_prepared(model)
    with collection_paused():
        converted = _convert(model, fold_quantize).eval()
    enforce_limits(converted)
    apply_io_dtypes(converted)
    if use_reference_representation:
        integer_representation(converted)
    return converted


def _require_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"`{name}` of convert_pt2e takes True or False, found {flag!r}.")


def _require_prepared(model: fx.GraphModule) -> None:
    found = phase_of(require_graph_module(model, "convert_pt2e"))
    if found == CONVERTED:
        raise ConvertError("convert_pt2e found a model that is converted already; use it as it is.")
    if found != PREPARED:
        raise ConvertError(
            "convert_pt2e found a graph module without observers; call `prepare_pt2e(model, quantizer)` "
            "and calibrate what it returns."
        )


def _convert(prepared: fx.GraphModule, fold: bool) -> fx.GraphModule:
    model = working_copy(prepared)
    run_as_operators(model.graph)
    fold_batch_norms_qat(model)
    submodels = {target: _convert(attribute(model, target), fold) for target in submodel_targets(model)}
    _replace_observers(model, fold)
    submodels = lift_constants(model, submodels)
    erase_dead_code(model.graph)
    _dequantize_before_readers(model.graph)
    converted = rebuilt(model, submodels)
    PHASE.put(converted, CONVERTED)
    FLOATS.drop(converted)
    return converted


def _dequantize_before_readers(graph: fx.Graph) -> None:
    """Moves the dequantize nodes of constants to their first readers.

    Behind the constants themselves all weights of a model would be there in float at once whenever it runs.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in place:
        if is_dequantize(node) and node.users and all(source.op == "get_attr" for source in node.all_input_nodes):
            min(node.users, key=place.__getitem__).prepend(node)


def _replace_observers(model: fx.GraphModule, fold: bool) -> None:
    """Replaces the observers of one graph, in two passes over its nodes."""
    observers = calls_of_observers(model.graph)
    constants = observe_constants(model.graph, observers)
    numbers = Numbers(observers.values())
    require_data(observers)
    observers = without_repeated(model.graph, observers, numbers)
    stand_in = write_pairs(model, observers, numbers, constants if fold else {})
    rewire(model.graph, stand_in)
    for call in reversed(stand_in):
        if not call.users:
            model.graph.erase_node(call)
