"""What the XNNPACK serializer wrote: every kernel call with its data types, and the graph node behind it.

Before: ExecuTorch's node visitors write each delegate's graph. After: the same graph, and a record of each kernel
call, from which the placement of every operator is read instead of guessed. What the visitors leave out is added.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from quantplug.core.peers.linux import let_go
from quantplug.lowering.xnnpack import batches
from quantplug.lowering.xnnpack.serializer.graph import break_chains, make_room, operands, tensor


@dataclass(frozen=True)
class KernelCall:
    """One node of a delegate's XNNPACK graph.

    Attributes:
        delegate: identity of the delegate's graph.
        kind: the kernel, e.g. "Conv2d" or "Convert".
        node: the edge-dialect node that it was written for.
        inputs: data types of its tensors as XNNPACK names them, e.g. "qint8"; constants among them.
        output: data type of its result.
        bounds: between which numbers it clamps its result, None if it does not.
    """

    delegate: int
    kind: str
    node: fx.Node
    inputs: tuple[str, ...]
    output: str
    bounds: tuple[float, float] | None = None

    @property
    def is_integer(self) -> bool:
        """Tells whether the kernel works on integers: static int8 or dynamically quantized int8."""
        return self.yields_integers or "qdint8" in self.inputs

    @property
    def yields_integers(self) -> bool:
        """Tells whether its result is static int8."""
        return self.output in ("qint8", "quint8")

    @property
    def reads_integers(self) -> bool:
        """Tells whether it works on integers, or on floats with a weight of integers."""
        return self.is_integer or any(kind.startswith("q") for kind in self.inputs)

    @property
    def is_convert(self) -> bool:
        """Tells whether it only changes the data type (quantize, dequantize)."""
        return self.kind == "Convert"

    @property
    def is_movement(self) -> bool:
        """Tells whether it only moves data and does no arithmetic."""
        return self.kind.startswith(("StaticTranspose", "StaticReshape", "StaticSlice", "Concatenate", "Copy"))


@contextmanager
def recorded_kernel_calls() -> Iterator[list[KernelCall]]:
    """Records every kernel call that ExecuTorch's XNNPACK serializer writes inside the block.

    The serializer's visitors are replaced by recording subclasses through its public registry and put
    back when the block ends.
    """
    from executorch.backends.xnnpack.operators.node_visitor import get_node_visitors, register_node_visitor

    calls: list[KernelCall] = []
    originals = {name: type(visitor) for name, visitor in get_node_visitors(None, {}, None).items()}
    for original in (*originals.values(), batches.visitor(originals["aten.bmm.default"])):
        register_node_visitor(_recording(_with_open_sizes(_with_quantization(original)), calls))
    try:
        yield calls
    finally:
        for original in originals.values():
            register_node_visitor(original)


def _with_quantization(original: Any) -> Any:
    """Returns a visitor that writes the quantization of its tensors too; the one of resizing leaves it out."""
    if original.target != "aten.upsample_bilinear2d.vec":
        return original

    def define_node(self: Any, node: fx.Node, xnn_graph: Any, vals_to_ids: Any, debug_handle: int) -> None:
        # A tensor is defined once: what is here already, the original leaves as it is.
        self.define_nodes_tensor_inputs_outputs(node, xnn_graph, vals_to_ids, convert_to_nhwc=True)
        original.define_node(self, node, xnn_graph, vals_to_ids, debug_handle)

    return type(original.__name__, (original,), {"define_node": define_node})


def _with_open_sizes(original: Any) -> Any:
    """Returns a visitor that leaves open sizes open; the one of slices writes their upper bounds.

    A size of 0 is the input's own: `xnn_define_static_slice` infers it at run time.
    """
    from executorch.backends.xnnpack.utils.utils import PERM_NCHW_TO_NHWC

    if original.target != "aten.slice_copy.Tensor":
        return original

    def define_node(self: Any, node: fx.Node, xnn_graph: Any, vals_to_ids: Any, debug_handle: int) -> None:
        original.define_node(self, node, xnn_graph, vals_to_ids, debug_handle)
        shape = list(node.meta["val"].shape)
        if "XNN_NHWC_NODE" in node.meta:
            shape = [shape[axis] for axis in PERM_NCHW_TO_NHWC]
        written = xnn_graph.xnodes[-1].xnode_union
        written.sizes = [size if isinstance(size, int) else 0 for size in shape]

    return type(original.__name__, (original,), {"define_node": define_node})


def _recording(original: Any, calls: list[KernelCall]) -> type:
    def define_node(self: Any, node: fx.Node, xnn_graph: Any, vals_to_ids: Any, debug_handle: int) -> None:
        before = len(xnn_graph.xnodes)
        original.define_node(self, node, xnn_graph, vals_to_ids, debug_handle)
        calls.extend(_call(node, xnn_graph, written) for written in xnn_graph.xnodes[before:])
        if node.next.op == "output":
            break_chains(xnn_graph)
            make_room(xnn_graph)
            for constant in self.exported_program.state_dict.values():
                let_go(constant)

    return type(f"Recording{original.__name__}", (original,), {"define_node": define_node})


def _call(node: fx.Node, xnn_graph: Any, written: Any) -> KernelCall:
    fields = vars(written.xnode_union)
    outputs = [v for k, v in fields.items() if k.startswith("output") and k.endswith("_id")]
    types = [_datatype(xnn_graph, value) for value in operands(written.xnode_union)]
    clamped = written.output_min_max
    return KernelCall(
        delegate=id(xnn_graph),
        kind=type(written.xnode_union).__name__.removeprefix("XNN"),
        node=node,
        inputs=tuple(t for t in types if t),
        output=_datatype(xnn_graph, outputs[0]),
        bounds=None if clamped is None else (float(clamped.output_min), float(clamped.output_max)),
    )


def _datatype(xnn_graph: Any, value_id: int) -> str:
    if not 0 <= value_id < len(xnn_graph.xvalues):
        return ""  # XNNPACK's mark for an absent operand
    return str(tensor(xnn_graph, value_id).datatype.name).removeprefix("xnn_datatype_")
