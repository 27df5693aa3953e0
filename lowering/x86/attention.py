"""Attention whose mask masks nothing.

Before: `scaled_dot_product_attention` with a boolean mask that export computed from sizes alone, as in encoders that
are given no mask. After: the same without it; the kernel would add it to the scores of every head.
"""

import torch
from torch import fx

from quantplug.core.graph.editing import erase_unused
from quantplug.core.graph.facts import constant_value, operands, viewed_node
from quantplug.core.patterns.language import Match, op, value
from quantplug.core.patterns.rules import Rule


def _unmask(match: Match) -> fx.Node | str:
    mask = match["mask"]
    known = constant_value(_source(mask))
    if known is None or known.dtype != torch.bool or not bool(known.all()):
        return "its mask is not known to let everything through"
    match.root.args, match.root.kwargs = (), {**operands(match.root), "attn_mask": None}
    erase_unused((mask,))
    return match.root


def _source(node: fx.Node) -> fx.Node:
    """Returns what a node is a view of."""
    viewed = viewed_node(node)
    return node if viewed is None else _source(viewed)


OPEN_MASKS = (Rule(op("scaled_dot_product_attention", attn_mask=value("mask")), _unmask),)
