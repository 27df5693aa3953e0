"""Private names of torch that we use, each with why, and what would take its place.

All but inductor's are there as soon as torch is; inductor's are imported by the calls.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

# Imported from private modules, as none has a public one, which would do:
# - the classes of what `torch.ops` holds, which tell an operator from another target of a node;
# - the values that export records and their mode, which tell a recorded value from a tensor of the user's;
# - trees, in whose structures export tells how a graph is called;
# - the dispatcher with which export computes the symbolic sizes of recurrences.
__all__ = [
    "BUILT_IN",
    "EXPORT_LOGGERS",
    "PACKAGE_LOGGERS",
    "WRITTEN_FOR",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionSchema",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "calling_structure",
    "custom_graph_pass",
    "enable_python_dispatcher",
    "inductor",
    "is_erased",
    "pytree",
    "registered_operators",
    "schema_of",
    "schema_or_none",
    "version_of",
    "with_structures",
]

# Another version may rename or mend what stands here: look at each name again, then set it.
WRITTEN_FOR = (2, 13)

# The type of an operator's schema; a public one, or a signature of operators with types and aliases, would do.
FunctionSchema = torch._C.FunctionSchema

# Where torch has what `F`, `torch.special`, `torch.linalg` and `torch.fft` show under other names: a function in
# `torch_fn` is recorded as it is called there. A recorded public name would do.
BUILT_IN = tuple(getattr(torch._C, room) for room in ("_nn", "_special", "_linalg", "_fft"))

# Who logs while a file of torch.export is read; a switch of `torch.export.load` would do.
EXPORT_LOGGERS = ("torch.export", "torch.export.pt2_archive._package", "torch._export.serde.serialize")

# Who logs while a package is loaded: that it is old, where there is no compiler to ask for this processor's vectors.
PACKAGE_LOGGERS = ("torch._inductor.package.package", "torch.export.pt2_archive._package")


def schema_of(operator: Any) -> FunctionSchema:
    """Returns the schema of an operator overload: its operands, results, and what it writes; no public name has it."""
    schema: FunctionSchema = operator._schema
    return schema


def schema_or_none(target: Any) -> FunctionSchema | None:
    """Returns the schema of an operator overload, None for another target of a node."""
    return getattr(target, "_schema", None)


def registered_operators() -> Iterator[str]:
    """Yields the names of all operators; `torch.ops` fills itself lazily, and no public name lists them."""
    return (schema.name for schema in torch._C._jit_get_all_schemas())


def is_erased(node: fx.Node) -> bool:
    """Tells whether a graph has lost a node; fx keeps no public record of that."""
    return node._erased


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place; autograd's counter has no public name."""
    return tensor._version


def calling_structure(graph: fx.Graph) -> Any:
    """Returns how a graph flattens its inputs and outputs, None where it does not.

    It stands only in the graph's code generator, which can be set in public (`Graph.set_codegen`), not read.
    """
    return getattr(graph._codegen, "pytree_info", None)


def with_structures(graph: fx.Graph, **structures: pytree.TreeSpec) -> Any:
    """Returns a graph's code generator with another structure of inputs (`in_spec`) or outputs (`out_spec`)."""
    codegen: Any = copy.copy(graph._codegen)
    codegen.pytree_info = codegen.pytree_info._replace(**structures)
    return codegen


def inductor() -> Any:
    """Returns inductor, for ahead-of-time packages and its options around calls, which `torch.compile` cannot set.

    torch's own documents call them by this name; packages and options under a public one would do.
    """
    import torch._inductor.config

    return torch._inductor


def custom_graph_pass() -> Any:
    """Returns the class of passes that inductor's options take, which has no public name; one would do."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass
