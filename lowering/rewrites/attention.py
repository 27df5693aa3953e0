"""Attention as products and a softmax, with keys and values that queries share in groups."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import call_like, set_operand
from quantplug.core.graph.facts import operands, operator_name, tensor_value
from quantplug.core.graph.operators import COPIES, VIEWS, schema_names
from quantplug.lowering.rewrites.masks import as_written, before_broadcasting
from quantplug.lowering.rewrites.writing import Writer, alike, axis_of, constant_operand, done, matching, open_among

_ATEN = torch.ops.aten
_REGROUPED = schema_names((*VIEWS, *COPIES))


def repeated_heads_are_grouped(model: fx.GraphModule) -> fx.GraphModule:
    """Lets attention read keys and values as they are that are repeated for groups of queries.

    Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
    2023.
    """
    for node, values in matching(model, "scaled_dot_product_attention"):
        key, value = (_before_repeating(values[name]) for name in ("key", "value"))
        if not values.get("enable_gqa") and key is not None and value is not None:
            set_operand(node, "enable_gqa", True)
            node.replace_input_with(values["key"], key)
            node.replace_input_with(values["value"], value)
    return done(model)


def shared_heads_are_rows(model: fx.GraphModule) -> fx.GraphModule:
    """Makes queries that share keys and values rows of one head, for kernels that would copy these for each query."""
    masks: dict[tuple[fx.Node, int], fx.Node] = {}
    for node, values in matching(repeated_heads_are_grouped(model), "scaled_dot_product_attention"):
        query, key = _shape(values["query"]), _shape(values["key"])
        is_shared = values.get("enable_gqa") and len(query) == len(key) == 4 and open_among((query[1], key[1])) == 0
        if not is_shared or query[1] == key[1] or values["is_causal"] or values["dropout_p"]:
            continue
        write, groups, mask = Writer(model, node), query[1] // key[1], values["attn_mask"]
        if mask is not None:
            if _is_of_heads_alone(_shape(mask)):
                continue
            place = (mask, groups)
            mask = masks[place] = masks.get(place) or _mask_of_rows(write, mask, groups)
        given = (write.call(_ATEN.flatten.using_ints, _in_groups(write, values["query"], groups), 2, 3), values["key"])
        target: Any = node.target
        found = write.call(target, *given, values["value"], mask, scale=values.get("scale"))
        apart = write.call(_ATEN.unflatten.int, found, 2, [groups, -1])
        write.replace(write.call(_ATEN.flatten.using_ints, apart, 1, 2))
    return done(model)


def _is_of_heads_alone(shape: list[Any]) -> bool:
    """Tells whether a mask is another one for each head, and the same for all queries of a head."""
    return len(shape) > 2 and shape[-3] != 1 and _is_one(shape[-2])


def _is_one(size: Any) -> bool:
    """Tells whether a size is 1 for certain; to compare an open one would decide about it."""
    return isinstance(size, int) and size == 1


def _in_groups(write: Writer, node: fx.Node, groups: int) -> fx.Node:
    """Returns [n, heads * groups, length, ...] as [n, heads, groups, length, ...]."""
    return write.call(_ATEN.unflatten.int, node, 1, [-1, groups])


def _mask_of_rows(write: Writer, mask: fx.Node, groups: int) -> fx.Node:
    """Returns a mask that queries read by their heads as one for groups of them, one behind the other."""
    for _ in range(4 - len(_shape(mask))):
        mask = write.call(_ATEN.unsqueeze.default, mask, 0)
    heads, length = _shape(mask)[1:3]
    if not _is_one(heads):
        return write.call(_ATEN.flatten.using_ints, _in_groups(write, mask, groups), 2, 3)
    return mask if _is_one(length) else write.call(_ATEN.repeat.default, mask, [1, 1, groups, 1])


def attention_is_products(model: fx.GraphModule) -> fx.GraphModule:
    """Writes scaled_dot_product_attention as matmul, softmax and matmul where the mask is known.

    ExecuTorch's decomposition guards against rows that are masked completely with portable operators that cost ten
    times the attention itself. A graph without mask has no such row; one whose mask is known and has none adds the
    mask; any other keeps the original, and so do heads that a layer would have to repeat, which is none to quantize.
    Source of the formula: Vaswani et al., "Attention Is All You Need", 2017, equation 1.
    """
    for node, values in matching(model, "scaled_dot_product_attention"):
        if not _is_plain(values) or _are_apart(values):
            continue
        mask = _known(Writer(model, node), values)
        if mask is not None:
            _write(Writer(model, node), values, mask)
    return done(model)


def any_attention_is_products(model: fx.GraphModule, taken: Callable[[fx.Node], bool] | None = None) -> fx.GraphModule:
    """Writes attention as products where the mask is computed too, once for all layers that have it.

    What is nowhere seen is masked by hand: its softmax is that of zeros, its result is multiplied by zero.

    Args:
        model: a graph module; it is changed in place and returned.
        taken: which nodes may be written so, None for all.
    """
    masks: dict[tuple[Any, int], _Mask] = {}
    for node, values in matching(model, "scaled_dot_product_attention"):
        if not _is_plain(values) or (taken is not None and not taken(node)):
            continue
        write, query = Writer(model, node), tensor_value(values["query"])
        mask = _known(write, values)
        if mask is None and values["attn_mask"] is not None and not values["is_causal"] and query is not None:
            given = before_broadcasting(values["attn_mask"])
            place = (as_written(given), query.dim())
            mask = masks.get(place) or masks.setdefault(place, _asked(write, given, query))
        if mask is not None:
            _write(write, values, mask)
    return done(model)


def attention_is_contiguous(model: fx.GraphModule) -> fx.GraphModule:
    """Writes a copy behind attention that stays as it is.

    Tracing gives its result the strides of a kernel for CPUs, turned already, and takes a reshape behind a transpose
    for a view. ExecuTorch writes it as products later, whose result has other strides.
    """
    for node, _ in matching(model, "scaled_dot_product_attention"):
        with model.graph.inserting_after(node):
            copy = call_like(model.graph, node, _ATEN.clone.default)
        copy.meta["val"] = node.meta.get("val")
        node.replace_all_uses_with(copy)
        copy.args, copy.kwargs = (node,), {"memory_format": torch.contiguous_format}
    return done(model)


@dataclass(frozen=True)
class _Mask:
    """What is added to the scores, and by what the result is multiplied; None for neither."""

    added: fx.Node | None = None
    seen: fx.Node | None = None


def _is_plain(values: dict[str, Any]) -> bool:
    query, key = tensor_value(values["query"]), tensor_value(values["key"])
    if query is None or key is None or values["dropout_p"]:
        return False
    if not _is_shared(values):
        return True
    shared = (query.shape[1], key.shape[1], query.shape[-1], key.shape[-1])
    return query.dim() == key.dim() == 4 and open_among(shared) == 0 and open_among((key.shape[0], key.shape[2])) <= 1


def _is_shared(values: dict[str, Any]) -> bool:
    """Tells whether queries read fewer heads than they have: as `enable_gqa` says, or one that is broadcast."""
    query, key, value = (_shape(values[name]) for name in ("query", "key", "value"))
    is_broadcast = len(query) == len(key) == len(value) == 4 and _is_one(key[1]) and _is_one(value[1])
    return bool(values.get("enable_gqa")) or (is_broadcast and isinstance(query[1], int) and query[1] > 1)


def _write(write: Writer, values: dict[str, Any], mask: _Mask) -> None:
    query = tensor_value(values["query"])
    assert query is not None
    heads = _heads(write, values)
    scale = values.get("scale")
    factor = float(scale) if scale is not None else 1.0 / math.sqrt(query.shape[-1])
    turned = write.call(_ATEN.transpose.int, heads.shared(values["key"]), -2, -1)
    # The factor goes onto the query: it is the smaller tensor.
    scaled = write.call(_ATEN.mul.Tensor, values["query"], write.number(factor, query, "attention_scale"))
    scores = heads.scores(write.call(_ATEN.matmul.default, heads.asking(scaled), turned))
    scores = scores if mask.added is None else write.call(_ATEN.add.Tensor, scores, heads.mask(mask.added))
    weights = heads.weights(write.call(_ATEN.softmax.int, scores, -1))
    found = heads.together(write.call(_ATEN.matmul.default, weights, heads.shared(values["value"])))
    write.replace(found if mask.seen is None else write.call(_ATEN.mul.Tensor, found, mask.seen))


def _heads(write: Writer, values: dict[str, Any]) -> "_Heads":
    if not _are_fewer(values):
        return _Heads()
    query, key = values["query"].meta["val"], values["key"].meta["val"]
    return (_HeadsApart if _are_apart(values) else _HeadsAsRows)(write, int(key.shape[1]), int(query.shape[1]))


def _are_fewer(values: dict[str, Any]) -> bool:
    """Tells whether keys have fewer heads than the queries that read them."""
    return _is_shared(values) and bool(values["key"].meta["val"].shape[1] != values["query"].meta["val"].shape[1])


def _are_apart(values: dict[str, Any]) -> bool:
    """Tells whether heads are shared, and scores have two open sizes: XNNPACK reshapes to one, as rows would need."""
    query, key = values["query"].meta["val"], values["key"].meta["val"]
    return _are_fewer(values) and open_among((query.shape[0], query.shape[2], key.shape[2])) > 1


class _Heads:
    """What attention multiplies, as the kernel's batches have it: each head of queries reads its own keys."""

    def asking(self, queries: fx.Node) -> fx.Node:
        """Returns queries as they are multiplied by keys."""
        return queries

    def shared(self, keys: fx.Node) -> fx.Node:
        """Returns keys, or values, as they are multiplied."""
        return keys

    def scores(self, product: fx.Node) -> fx.Node:
        """Returns scores as masks and softmax read them."""
        return product

    def mask(self, added: fx.Node) -> fx.Node:
        """Returns what is added to scores."""
        return added

    def weights(self, softmax: fx.Node) -> fx.Node:
        """Returns weights as they are multiplied by values."""
        return softmax

    def together(self, product: fx.Node) -> fx.Node:
        """Returns [n, queries, length, channels]."""
        return product


@dataclass(frozen=True)
class _SharedHeads(_Heads):
    """Queries of several heads read the same keys.

    Attributes:
        write: writes the nodes.
        heads: of keys and values.
        queries: heads of the queries.
    """

    write: Writer
    heads: int
    queries: int


class _HeadsAsRows(_SharedHeads):
    """Queries that read the same keys are rows of one matrix, one head behind the other."""

    def _in_heads(self, node: fx.Node, heads: int) -> fx.Node:
        value = tensor_value(node)
        assert value is not None
        length = value.shape[1] * value.shape[2] // heads
        return self.write.reshape(node, value.shape[0], heads, length, value.shape[3])

    def asking(self, queries: fx.Node) -> fx.Node:
        return self._in_heads(queries, self.heads)

    def scores(self, product: fx.Node) -> fx.Node:
        return self._in_heads(product, self.queries)

    def weights(self, softmax: fx.Node) -> fx.Node:
        return self._in_heads(softmax, self.heads)

    def together(self, product: fx.Node) -> fx.Node:
        return self._in_heads(product, self.queries)


class _HeadsApart(_SharedHeads):
    """Queries are [n, heads, queries of a head, length, channels], and the keys are broadcast."""

    def _of_five(self, node: fx.Node, heads: int, groups: int) -> fx.Node:
        value = tensor_value(node)
        assert value is not None
        return self.write.reshape(node, value.shape[0], heads, groups, *value.shape[2:])

    def asking(self, queries: fx.Node) -> fx.Node:
        return self._of_five(queries, self.heads, self.queries // self.heads)

    def shared(self, keys: fx.Node) -> fx.Node:
        return self._of_five(keys, self.heads, 1)

    def mask(self, added: fx.Node) -> fx.Node:
        batch, heads = _shape(added)[:2]
        if _is_one(batch) and _is_one(heads):
            return added
        sizes = [1, 1] if _is_one(heads) else [self.heads, self.queries // self.heads]
        return self.write.call(_ATEN.unflatten.int, added, 1, sizes)

    def together(self, product: fx.Node) -> fx.Node:
        batch, _, _, length, channels = _shape(product)
        return self.write.reshape(product, batch, self.queries, length, channels)


def _known(write: Writer, values: dict[str, Any]) -> _Mask | None:
    """Returns the mask of attention that has none or a known one without rows that see nothing, None for others."""
    query, key, given = tensor_value(values["query"]), tensor_value(values["key"]), values["attn_mask"]
    if query is None or key is None:
        return None
    if given is None and not values["is_causal"]:
        return _Mask()
    held = _causal(query, key) if given is None else constant_operand(given)
    if held is None or not bool(_seen(held).all()):
        return None
    if held.dtype == torch.bool:
        held = torch.zeros(held.shape, dtype=query.dtype).masked_fill(~held, -math.inf)
    return _Mask(given if given is not None and constant_operand(given) is held else write.constant(held, "mask"))


def _seen(mask: Tensor) -> Tensor:
    """Returns which rows of a mask see anything, with a last dimension of 1."""
    return (mask if mask.dtype == torch.bool else mask != -math.inf).any(-1, keepdim=True)


def _asked(write: Writer, mask: fx.Node, query: Tensor) -> _Mask:
    """Writes what a mask that is known at run time alone adds, of the queries' rank."""
    value = tensor_value(mask)
    assert value is not None
    for _ in range(query.dim() - value.dim()):
        mask = write.call(_ATEN.unsqueeze.default, mask, 0)
    seen = mask if value.dtype == torch.bool else write.call(_ATEN.ne.Scalar, mask, -math.inf)
    seen_rows = write.call(_ATEN.any.dim, seen, -1, True)
    nothing, never = (write.constant(torch.tensor(n, dtype=query.dtype), "mask") for n in (0.0, -math.inf))
    shown = nothing if value.dtype == torch.bool else mask
    added = write.call(_ATEN.where.self, seen, shown, never)
    added = write.call(_ATEN.where.self, seen_rows, added, nothing)
    return _Mask(added, write.call(_ATEN.to.dtype, seen_rows, query.dtype))


def _causal(query: Tensor, key: Tensor) -> Tensor | None:
    sizes = (query.shape[-2], key.shape[-2])
    return torch.ones(sizes, dtype=torch.bool).tril() if all(isinstance(size, int) for size in sizes) else None


def _before_repeating(node: fx.Node) -> fx.Node | None:
    """Returns what [n, heads * times, length, channels] repeats head by head, None where it repeats nothing."""
    shape = _shape(node)
    if operator_name(node) == "aten::repeat_interleave":
        given = operands(node)
        times, source = given.get("repeats"), given["self"]
        is_by_head = isinstance(times, int) and given.get("dim") is not None and axis_of(given["dim"], len(shape)) == 1
        return source if is_by_head and len(shape) == 4 else None
    while operator_name(node) in _REGROUPED:
        node = operands(node)["self"]
    repeated = _shape(node)
    if operator_name(node) != "aten::expand" or len(shape) != 4:
        return None
    one = operands(node)["self"]
    if len(repeated) == 4:
        is_of_one_head = _is_one(_shape(one)[1]) and alike([*_shape(one)[:1], shape[1], *_shape(one)[2:]], shape)
        return one if is_of_one_head and alike(repeated, shape) else None
    if len(repeated) != 5:
        return None
    before, is_one = _shape(one), operator_name(one) == "aten::unsqueeze"
    source = operands(one)["self"] if is_one else one
    joined = [*repeated[:1], repeated[1] * repeated[2], *repeated[3:]]
    is_repeated = alike(before, [*repeated[:2], 1, *repeated[3:]]) and alike(joined, shape)
    return source if is_one and is_repeated else None


def _shape(node: Any) -> list[Any]:
    value = tensor_value(node)
    return [] if value is None else list(value.shape)
