"""From a rewritten graph to a model of ONNX.

Before: an exported program in the forms of `forms.py`. After: a checked model. Each of its nodes has the name of the
node of torch's graph that it comes from and a number, by which the kernels of ONNX Runtime are known again.
"""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantplug.core.errors import LoweringError, first_line, shown
from quantplug.lowering.onnx.engines import Engine
from quantplug.lowering.onnx.translations import translations

_NAMED = re.compile(r"@(\d+)@")
_MISSING = re.compile(r"No (?:ONNX function|decompositions registered|Torchlib|dispatch)[^\n]*?(\w+[.:]+\w+[.\w]*)")


def to_onnx(
    exported: torch.export.ExportedProgram, opset: int, narrow: frozenset[str], engine: Engine
) -> tuple[Any, Any]:
    """Returns a model of ONNX, and the program of torch that its nodes name.

    Args:
        exported: the program.
        opset: of the model.
        narrow: names of integers that take four bits.
        engine: what is to read it.

    Raises:
        LoweringError: an operator has no form in ONNX.
    """
    try:
        with _quiet():
            found = torch.onnx.export(
                exported,
                dynamo=True,
                opset_version=opset,
                optimize=False,
                verbose=False,
                custom_translation_table=dict(translations(opset)),
            )
    except Exception as error:
        raise LoweringError(
            f"ONNX opset {opset} has no form of the q/dq graph ({_said(error)}); keep the operator that it names "
            f"outside of the model or choose a later opset{engine.remedy}."
        ) from error
    assert found is not None  # nothing is returned where the older exporter writes a file
    with _quiet():
        _tidy(found.model, narrow)
    return found.model, found.exported_program


def number_of(name: str) -> int | None:
    """Returns the number of the node of a model that a node of ONNX Runtime's graph comes from, None for none."""
    found = _NAMED.search(name)
    return None if found is None else int(found[1])


def checked(model: Any) -> bytes | None:
    """Returns the bytes of a model that ONNX's checker takes; None where they are more than one file holds.

    Raises:
        LoweringError: the checker objects.
    """
    import onnx
    import onnx_ir

    if sum(value.const_value.nbytes for value in model.graph.initializers.values()) > 2**31 - 2**24:
        return None
    proto = onnx_ir.to_proto(model)
    try:
        onnx.checker.check_model(proto, full_check=False)
    except onnx.checker.ValidationError as error:
        raise LoweringError(f"ONNX's checker refuses the model: {first_line(error)}; report the model.") from error
    content: bytes = proto.SerializeToString()
    return content


def _tidy(model: Any, narrow: frozenset[str]) -> None:
    """Names nodes, lifts constants to initializers, and stores what takes four bits in four."""
    import onnx_ir
    from onnx_ir.passes import common

    _take_certain_branches(model)
    # What tells of the exporter's own machine, such as lines of the model's source, is no part of the model.
    model.metadata_props.clear()
    for number, node in enumerate(model.graph):
        source = node.meta.get("node")
        # What the exporter composes of several operators yields a value of its node's name.
        node.name = f"{node.outputs[0].name if source is None else source.name}@{number}@"
        node.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _cast_constants(model)
    common.RemoveUnusedNodesPass()(model)
    for name in narrow & set(model.graph.initializers):
        value = model.graph.initializers[name]
        kind = onnx_ir.DataType.INT4
        value.const_value = onnx_ir.tensor(value.const_value.numpy().astype(kind.numpy()), dtype=kind, name=name)
        value.dtype = kind
    _drop_fixed(model)


def _take_certain_branches(model: Any) -> None:
    """Leaves out branches that no call takes: nested ones, as of `aten.embedding_bag`, end ONNX Runtime 1.32."""
    from onnxscript import optimizer

    if any(node.op_type == "If" for node in model.graph):
        optimizer.fold_constants(
            model,
            onnx_shape_inference=False,
            input_size_limit=16,  # in numbers; weights stay in the integers and halves that they are
            should_fold=lambda node: False if node.op_type in ("DequantizeLinear", "QuantizeLinear") else None,
        )


def _cast_constants(model: Any) -> None:
    """Casts constants here that a node casts like an activation, which would else have a reader more."""
    import onnx_ir

    for node in list(model.graph):
        like = node.inputs[1].dtype if node.op_type == "CastLike" else None
        held = node.inputs[0].const_value if node.op_type == "CastLike" else None
        if held is None or like is None:
            continue
        name = node.outputs[0].name
        kind, numbers = onnx_ir.TensorType(like), held.numpy().astype(like.numpy())
        tensor = onnx_ir.tensor(numbers, dtype=like, name=name)
        value = onnx_ir.Value(name=f"{name}_cast", const_value=tensor, type=kind, shape=tensor.shape)
        model.graph.register_initializer(value)
        node.outputs[0].replace_all_uses_with(value)


def _drop_fixed(model: Any) -> None:
    """Takes away inputs that are no tensors; the graph holds their values."""
    for given in list(model.graph.inputs):
        source = given.meta.get("node")
        if source is not None and not isinstance(source.meta.get("val"), Tensor) and not given.uses():
            model.graph.inputs.remove(given)


def _said(error: Exception) -> str:
    """Returns what the exporter says: the operator without a form, else the first line of what it began with."""
    cause: BaseException = error
    while (behind := cause.__cause__ or cause.__context__) is not None:
        missing = _MISSING.search(str(cause))
        if missing:
            break
        cause = behind
    missing = _MISSING.search(str(cause))
    return f"there is none of {shown(missing[1])}" if missing else first_line(cause)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what the exporter prints and logs for its own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
