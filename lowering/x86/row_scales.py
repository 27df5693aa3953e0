"""Scales of run time for each row or sample, which no kernel of oneDNN in torch chooses.

Before: choose_qparams, quantize and dequantize nodes of such a tensor, from another backend's config. After: the same
numbers by operators of torch's own, so that the file needs no other library; what reads them computes in float. Ranges
that other quantizers choose otherwise, such as symmetric ones, stay as they are.
"""

from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e import PerToken

from quantplug.core.graph.editing import erase_dead_code
from quantplug.core.graph.facts import rank
from quantplug.core.graph.meta import REASON
from quantplug.core.qdq.nodes import is_dequantize, range_of
from quantplug.lowering.run_time import Chain, chain_of

_ATEN = torch.ops.aten
_LOW, _HIGH = -128, 127


def spell_out_rows(graph: fx.Graph) -> dict[str, str]:
    """Writes scales for rows and samples out in ATen operators.

    Returns:
        Why the operators that read such tensors have no integer kernel, by their names.
    """
    reasons: dict[str, str] = {}
    chains = [chain_of(node) for node in graph.nodes if is_dequantize(node)]
    for chain in chains:
        if chain is None or chain.granularity is None or rank(chain.source) is None:
            continue
        reason = f"its input has a scale {range_of(chain.dequantize)}, the kernel takes one for the tensor"
        reasons |= {user.name: reason for user in chain.dequantize.users}
        if not chain.takes_all:
            continue  # torchao's operators stay, which torch runs as well
        with graph.inserting_before(chain.choose):
            written = _written(graph, chain)
        written.meta.update({k: v for k, v in chain.dequantize.meta.items() if k != REASON.key})
        chain.dequantize.replace_all_uses_with(written)
    erase_dead_code(graph)
    return reasons


def _written(graph: fx.Graph, chain: Chain) -> fx.Node:
    def on(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    source = chain.source
    dims = [-1] if chain.granularity == PerToken() else list(range(1, rank(source) or 1))
    low = on(_ATEN.clamp_max.default, on(_ATEN.amin.default, source, dims, True), 0)
    high = on(_ATEN.clamp_min.default, on(_ATEN.amax.default, source, dims, True), 0)
    span = on(_ATEN.div.Tensor, on(_ATEN.sub.Tensor, high, low), float(_HIGH - _LOW))
    scale = on(_ATEN.clamp_min.default, span, torch.finfo(torch.float32).eps)
    least = on(_ATEN.round.default, on(_ATEN.div.Tensor, low, scale))
    zero = on(_ATEN.clamp.default, on(_ATEN.rsub.Scalar, least, _LOW), _LOW, _HIGH)
    steps = on(_ATEN.add.Tensor, on(_ATEN.round.default, on(_ATEN.div.Tensor, source, scale)), zero)
    integers = on(_ATEN.clamp.default, steps, _LOW, _HIGH)
    return on(_ATEN.mul.Tensor, on(_ATEN.sub.Tensor, integers, zero), scale)
