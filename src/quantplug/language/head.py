"""The head of a decoder computes each token while texts are read, and the last one alone in the program.

A decoder is asked for the logits behind its last token, so that its head reads one row of a text. Observers and
recipes learn of a head from all rows: `GPTQ` with one row for each of 189 texts would fit 576 columns to 189 rows.
Before: an exported decoder. After: the same with another first row, and back.
"""

import torch
from torch import fx

_LAST, _FIRST = -1, 0
_TOKENS = 1  # the dimension of rows [1, tokens, channels]


def read_each_token(decoder: fx.GraphModule) -> str | None:
    """Lets the head of a decoder read each token, in place; the decoder returns the same as before.

    Returns:
        The name of the node that hands rows to the head, which `read_last_token` takes; None where there is none.
    """
    node = decoder.graph.output_node()
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if node.target is torch.ops.aten.slice.Tensor and node.args[1:3] == (_TOKENS, _LAST):
            _begin(decoder, node, _FIRST)
            return node.name
    return None


def read_last_token(decoder: fx.GraphModule, name: str | None) -> None:
    """Lets the head read the last token alone again, in place.

    Args:
        decoder: what came of the one that `read_each_token` changed.
        name: what it returned.
    """
    if name is not None:
        (rows,) = (node for node in decoder.graph.nodes if node.name == name)
        _begin(decoder, rows, _LAST)


def _begin(decoder: fx.GraphModule, rows: fx.Node, first: int) -> None:
    rows.update_arg(2, first)
    decoder.recompile()
