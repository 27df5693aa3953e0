"""A decoder gives the logits behind each token while texts are read, and those behind the last one in the program.

A decoder is asked for its last token, so that its head reads one row of a text. Observers and recipes learn of a head
from all rows: `GPTQ` with one row for each of 189 texts would fit 576 columns to 189 rows, and what compares outputs
or trains for them would see one token of each text. Before: an exported decoder. After: the same with another first
row and another output, and back. What is recorded of shapes stays that of one token, which the program is made for.
"""

from dataclasses import dataclass

import torch
from torch import fx

from quantplug.core.graph.editing import erase_unused, viewed
from quantplug.core.graph.facts import tensor_value

_LAST, _FIRST = -1, 0
_TOKENS = 1  # the dimension of rows [1, tokens, channels]
_SLICE = torch.ops.aten.slice.Tensor
_SELECT = torch.ops.aten.select.int
_RESHAPE = torch.ops.aten.reshape.default


@dataclass(frozen=True)
class Head:
    """What a decoder was before it gave each token's logits.

    Attributes:
        rows: the name of the node that hands rows to the head; None where the head reads each token anyway.
        selects: whether the last token's logits were selected of what the head computed.
    """

    rows: str | None
    selects: bool


def read_each_token(decoder: fx.GraphModule) -> Head:
    """Lets the head of a decoder read each token, and the decoder return the logits behind each, in place.

    Returns:
        What `read_last_token` takes.
    """
    output = decoder.graph.output_node()
    selected = output.all_input_nodes[0]
    selects = selected.target is _SELECT and selected.args[1:] == (_TOKENS, _LAST)
    if selects:
        output.replace_input_with(selected, selected.all_input_nodes[0])
        erase_unused([selected])
    rows = _rows_of(output)
    if rows is not None:
        rows.update_arg(2, _FIRST)
    decoder.recompile()
    return Head(None if rows is None else rows.name, selects)


def read_last_token(decoder: fx.GraphModule, head: Head) -> None:
    """Lets the head read the last token alone again, and the decoder return its logits, in place.

    Args:
        decoder: what came of the one that `read_each_token` changed.
        head: what it returned.
    """
    output = decoder.graph.output_node()
    logits = output.all_input_nodes[0]
    if head.selects and head.rows is None:
        output.replace_input_with(logits, viewed(output, _SELECT, logits, _TOKENS, _LAST))
    elif head.selects:
        value = tensor_value(logits)
        assert value is not None
        output.replace_input_with(logits, viewed(output, _RESHAPE, logits, [1, int(value.shape[-1])]))
    if head.rows is not None:
        (rows,) = (node for node in decoder.graph.nodes if node.name == head.rows)
        rows.update_arg(2, _LAST)
    decoder.recompile()


def _rows_of(output: fx.Node) -> fx.Node | None:
    """Returns the node that hands the last token's row to the head."""
    node = output
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if node.target is _SLICE and node.args[1:3] == (_TOKENS, _LAST):
            return node
    return None
