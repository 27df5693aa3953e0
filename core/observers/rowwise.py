"""Scales chosen at run time for each row, or for each sample, of a tensor.

Before: a dynamic spec whose observer has a granularity of torchao's: `PerToken()`, one scale and zero point for
each row along the last dimension, or `PerAxis(0)`, one for each sample of a batch. After: the nodes that choose
them, quantize and dequantize.

Kernels that quantize their input at run time work so: a long sentence or a bright image does not cost its
neighbours their precision.
"""

import operator
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e import FakeQuantizeBase, PerAxis, PerToken, PlaceholderObserver

from quantplug.core.errors import ConfigError
from quantplug.core.qdq.nodes import CHOOSE_ROWS, DEQUANTIZE_ROWS, QUANTIZE_ROWS

Granularity: TypeAlias = PerToken | PerAxis

_OPS = torch.ops.quantized_decomposed
_AFFINE = torch.ops.torchao
_RANGE = (-128, 127)
_LIMITS = (torch.int8, *_RANGE)
# Of samples: the least scale, 2**-23 in the operator for rows, and the dtypes of scale and zero point.
_DTYPES = (torch.finfo(torch.float32).tiny, torch.float32, torch.int32)


class RowObserver(PlaceholderObserver):
    """Stands for a range that is found at run time, in each row or sample by itself; it observes nothing.

    Args:
        granularity: `PerToken()` for rows along the last dimension, `PerAxis(0)` for samples.
        options: as for torchao's `PlaceholderObserver`.

    Raises:
        ConfigError: another granularity, or integers other than the whole of int8.
    """

    def __init__(self, granularity: Granularity = PerToken(), **options: Any) -> None:  # noqa: B008  (frozen)
        super().__init__(**options)
        self.granularity = granularity
        self.quant_min, self.quant_max = _checked(self)

    def convert(self, model: fx.GraphModule, observer_node: fx.Node) -> None:
        """Puts the nodes in the place of a call of this observer: torchao's way for observers that know theirs."""
        _convert(model, observer_node, self)


class RowFakeQuantize(FakeQuantizeBase):
    """Quantizes and dequantizes each row or sample by itself, in training; gradients pass as they are.

    No value lies outside of a range that was just found, so that nothing is clipped.

    Args:
        granularity: `PerToken()` for rows along the last dimension, `PerAxis(0)` for samples.
        dtype: torch.int8.
        quant_min: None or -128.
        quant_max: None or 127.
        qscheme: None or torch.per_tensor_affine.
        is_dynamic: must be true.

    Raises:
        ConfigError: another granularity, or integers other than the whole of int8.
    """

    def __init__(
        self,
        granularity: Granularity = PerToken(),  # noqa: B008  (frozen)
        dtype: torch.dtype = torch.int8,
        quant_min: int | None = None,
        quant_max: int | None = None,
        qscheme: torch.qscheme | None = None,
        is_dynamic: bool = True,
    ) -> None:
        super().__init__()
        self.granularity, self.dtype, self.is_dynamic = granularity, dtype, is_dynamic
        self.qscheme = torch.per_tensor_affine if qscheme is None else qscheme
        self.quant_min, self.quant_max = quant_min, quant_max
        self.quant_min, self.quant_max = _checked(self)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x as its integers stand for it, or x itself while fake quantization is disabled."""
        if self.fake_quant_enabled[0] == 0:
            return x
        with torch.no_grad():
            rounded = quantize_dequantize(x, self.granularity)
        from quantplug.core.observers.straight_through import straight_through  # a declaration trains nothing

        return straight_through(x, rounded)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Raises, since there is no range before the program runs.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("A scale for each row is chosen when the program runs; there is none to ask for before.")

    def convert(self, model: fx.GraphModule, observer_node: fx.Node) -> None:
        """Puts the nodes in the place of a call of this fake quantize."""
        _convert(model, observer_node, self)


def _checked(observer: Any) -> tuple[int, int]:
    """Returns the range of a new observer's integers; what the operators do not have is refused."""
    if observer.granularity not in (PerToken(), PerAxis(0)):
        raise ConfigError(
            f"A range of run time has the granularity {observer.granularity}; choose PerToken() for rows or PerAxis(0) "
            "for samples."
        )
    low, high = observer.quant_min, observer.quant_max
    found = (_RANGE[0] if low is None else low, _RANGE[1] if high is None else high)
    if found != _RANGE or observer.dtype not in (torch.int8, torch.qint8, torch.float32):
        raise ConfigError(
            f"A scale for each row is chosen for the integers {found[0]}..{found[1]} of {observer.dtype}; the "
            "operators take -128..127 of torch.int8."
        )
    if observer.qscheme not in (None, torch.per_tensor_affine):
        raise ConfigError(
            f"A scale for each row has the qscheme {observer.qscheme}; choose torch.per_tensor_affine, each row has a "
            "zero point."
        )
    return found


def by_rows(observer: Any) -> bool:
    """Tells whether an observer stands for a scale of each row or sample, chosen at run time."""
    return isinstance(observer, (RowObserver, RowFakeQuantize))


def granularity_of(spec: Any) -> Granularity | None:
    """Returns for what a dynamic spec has a scale each, None for one scale for the whole tensor."""
    constructor = getattr(getattr(spec, "observer_or_fake_quant_ctr", None), "p", None)
    made: Any = getattr(constructor, "func", getattr(spec, "observer_or_fake_quant_ctr", None))
    if not isinstance(made, type) or not issubclass(made, (RowObserver, RowFakeQuantize)):
        return None
    found: Granularity = getattr(constructor, "keywords", {}).get("granularity", PerToken())
    return found


def granularity_text(granularity: Granularity | None) -> str:
    """Returns how reports call a granularity."""
    return "" if granularity is None else "per row" if granularity == PerToken() else "per sample"


def add_rows(graph: fx.Graph, source: fx.Node, granularity: Granularity) -> fx.Node:
    """Adds choose_qparams, quantize and dequantize after the insertion point and returns the dequantize node."""
    value = source.meta.get("val")
    output = value.dtype if isinstance(value, Tensor) else torch.float32
    if granularity == PerToken():
        chosen = _chosen(graph, CHOOSE_ROWS, source, torch.int8)
        quantize = graph.call_function(QUANTIZE_ROWS, (source, *chosen, *_RANGE, torch.int8))
        return graph.call_function(DEQUANTIZE_ROWS, (quantize, *chosen, *_RANGE, torch.int8, output))
    packets = (_AFFINE.choose_qparams_affine, _AFFINE.quantize_affine, _AFFINE.dequantize_affine)
    operators = tuple(found.default for found in packets)
    return _add_blocks(graph, source, [1, *_sizes(graph, source)[1:]], operators, output)


def _add_blocks(
    graph: fx.Graph, source: fx.Node, block: Any, operators: tuple[Any, ...], output: torch.dtype
) -> fx.Node:
    choose, quantize, dequantize = operators
    chosen = _chosen(graph, choose, source, "ASYMMETRIC", block, *_LIMITS, *_DTYPES)
    integers = graph.call_function(quantize, (source, block, *chosen, *_LIMITS))
    return graph.call_function(dequantize, (integers, block, *chosen, *_LIMITS), {"output_dtype": output})


def _chosen(graph: fx.Graph, choose: Any, *args: Any) -> tuple[fx.Node, fx.Node]:
    chosen = graph.call_function(choose, args)
    scale = graph.call_function(operator.getitem, (chosen, 0))
    return scale, graph.call_function(operator.getitem, (chosen, 1))


def _sizes(graph: fx.Graph, source: fx.Node) -> list[Any]:
    """Returns the sizes of a tensor, those that are open as nodes, but for the first, of which no block has more.

    Raises:
        ConfigError: the shape of the tensor is not known.
    """
    value = source.meta.get("val")
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"The tensor '{source.name}' has no recorded shape, and a scale for each sample needs one; export the "
            "model with torch.export."
        )
    size = torch.ops.aten.sym_size.int
    sizes: Any = enumerate(value.shape)
    return [s if isinstance(s, int) or d == 0 else graph.call_function(size, (source, d)) for d, s in sizes]


def quantize_dequantize(x: Tensor, granularity: Granularity) -> Tensor:
    """Returns a tensor as the nodes of `add_rows` return it."""
    found: Tensor
    if granularity == PerToken():
        tail = (*CHOOSE_ROWS(x, torch.int8), *_RANGE, torch.int8)
        found = DEQUANTIZE_ROWS(QUANTIZE_ROWS(x, *tail), *tail, x.dtype)
    else:
        block = [1, *x.shape[1:]]
        chosen = _AFFINE.choose_qparams_affine(x, "ASYMMETRIC", block, *_LIMITS, *_DTYPES)
        integers = _AFFINE.quantize_affine(x, block, *chosen, *_LIMITS)
        found = _AFFINE.dequantize_affine(integers, block, *chosen, *_LIMITS, output_dtype=x.dtype)
    return found


def _convert(model: fx.GraphModule, call: fx.Node, observer: Any) -> None:
    """Torchao's convert looks for its operators of blocks, without the overload."""
    source, graph = call.all_input_nodes[0], model.graph
    operators = (_AFFINE.choose_qparams_affine, _AFFINE.quantize_affine, _AFFINE.dequantize_affine)
    with graph.inserting_before(call):
        sizes = _sizes(graph, source)
        rows = observer.granularity == PerToken()
        block = [*(1 for _ in sizes[1:]), *sizes[-1:]] if rows else [1, *sizes[1:]]
        result = _add_blocks(graph, source, block, operators, source.meta["val"].dtype)
    call.replace_all_uses_with(result)
    model.graph.erase_node(call)
