"""From an exported program to ExecuTorch's edge program with its delegates, decomposed once.

Before: an exported program. After: an edge program whose delegates are serialized. ExecuTorch's own way there
decomposes the program three times, because a partitioner may refuse single operators of a kind that it wants whole;
each time traces all of it, which was more than a quarter of the time that lowering a language model took.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram

from quantplug.core.graph.facts import is_written, operator_name
from quantplug.core.peers.glibc import give_back
from quantplug.core.peers.torch_names import schema_of

# Bytes of weights from which it is worth a second to collect the copies of them, and of graphs, that steps left.
LARGE = 2**26


def lowered_edge(
    exported: ExportedProgram, passes: Sequence[Any], partitioners: Sequence[Any], constants: Mapping[str, Any]
) -> Any:
    """Returns an edge program in which partitioners have what they take.

    Args:
        exported: the program.
        passes: over the edge program, before it is partitioned.
        partitioners: in the order in which they are asked.
        constants: what further methods return, by their names.
    """
    from executorch.backends.xnnpack.utils.configs import get_xnnpack_edge_compile_config
    from executorch.exir import to_edge_transform_and_lower

    edge = _decomposed_once(exported, passes, partitioners[0], constants) if len(partitioners) == 1 else None
    return edge or to_edge_transform_and_lower(
        exported,
        transform_passes=list(passes),
        partitioner=list(partitioners),
        compile_config=get_xnnpack_edge_compile_config(),  # the runtime has the last word, not the verifier
        constant_methods=dict(constants),
    )


def _decomposed_once(
    exported: ExportedProgram, passes: Sequence[Any], partitioner: Any, constants: Mapping[str, Any]
) -> Any | None:
    """Returns an edge program, None if an operator that was kept whole is refused and has to be decomposed."""
    from executorch.backends.xnnpack.utils.configs import get_xnnpack_edge_compile_config
    from executorch.exir import to_edge

    config = get_xnnpack_edge_compile_config()
    wanted, _ = partitioner.ops_to_not_decompose(exported)
    config.preserve_ops = list(wanted)
    edge = to_edge(exported, constant_methods=dict(constants), compile_config=config)
    _collect_if_large(exported)
    _, takes = partitioner.ops_to_not_decompose(edge.exported_program())
    if not all(map(takes, _whole(edge.exported_program(), wanted))):
        return None
    edge = edge.transform(list(passes))
    _collect_if_large(exported)
    edge = edge.to_backend(partitioner)
    _collect_if_large(exported)
    return None if _whole(edge.exported_program(), wanted) else edge


def _collect_if_large(program: ExportedProgram) -> None:
    """Collects the graphs that steps of the lowering of a large program left, which refer to themselves."""
    if sum(value.nbytes for value in program.state_dict.values()) >= LARGE:
        give_back()


def _whole(program: ExportedProgram, kinds: Iterable[Any]) -> list[fx.Node]:
    """Returns the operators of some kinds, those of submodels too."""
    names = {str(schema_of(kind).name) for kind in kinds}
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if operator_name(node) in names]


@contextmanager
def constants_shared(program: ExportedProgram) -> Iterator[None]:
    """Lets copies of a program have its own constants, inside of the block, but for buffers that it writes.

    ExecuTorch copies each delegate's part twice, "in case backends change graph", and keeps the copies: twice the
    weights of a model.
    """
    buffers = program.graph_signature.inputs_to_buffers
    written = {buffers.get(node.name) for node in program.graph.find_nodes(op="placeholder") if is_written(node)}
    written |= {*program.graph_signature.buffers_to_mutate.values()}
    held = {**program.state_dict, **program.constants}
    shared = [value for name, value in held.items() if isinstance(value, Tensor) and name not in written]
    for value in shared:
        vars(value)["__deepcopy__"] = partial(_itself, value)
    try:
        yield
    finally:
        for value in shared:
            vars(value).pop("__deepcopy__", None)  # of two names of one tensor


def _itself(tensor: Tensor, memo: object) -> Tensor:
    return tensor
