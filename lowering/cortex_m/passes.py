"""ExecuTorch's passes for Cortex-M in the order and the form in which they take every graph of our rules.

Before: ExecuTorch is installed with what these passes import. After: their classes. It is imported by what needs them,
as the passes take seconds to import.
"""

from typing import Any

import torch
from executorch.backends.cortex_m.passes.cortex_m_pass_manager import CortexMPassManager
from executorch.backends.cortex_m.passes.replace_quant_nodes_pass import ReplaceQuantNodesPass
from executorch.backends.transforms.replace_scalar_with_tensor import ReplaceScalarWithTensorArgPass
from executorch.exir.pass_base import NodeMetadata, ProxyValue
from torch import Tensor

from quantplug.core.peers.torch_names import pytree
from quantplug.lowering.executorch_names import folding_pass

_ARMS_FOLDING_PASS: Any = folding_pass()


class _FoldingPass(_ARMS_FOLDING_PASS):
    """The pass that takes q/dq nodes into operators, and then traces operators of float on integers.

    In ExecuTorch 1.4 some take none, others yield float from them, which the next one does not multiply with its weight
    of integers. So they are traced on floats, and their result is noted as integers.
    """

    def call_operator(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: NodeMetadata, updated: bool | None = False
    ) -> ProxyValue:
        """Traces one operator."""
        folded = meta.data.get("output_qparams")
        if not folded:
            return super().call_operator(op, args, kwargs, meta, updated)
        args, kwargs = pytree.tree_map_only(ProxyValue, _in_float, (args, kwargs))
        traced = super().call_operator(op, args, kwargs, meta, updated)
        value = traced.data.to(next(iter(folded.values())).dtype)
        traced.node.meta["val"] = value
        return ProxyValue(value, traced.proxy)


def _in_float(value: ProxyValue) -> ProxyValue:
    is_tensor = isinstance(value.data, Tensor)
    return ProxyValue(value.data.to(torch.float32), value.proxy) if is_tensor else value


def passes() -> list[Any]:
    """Returns the passes; those that trace all operators come before the folding and after the last rewriting."""
    instead = {_ARMS_FOLDING_PASS: _FoldingPass}
    tracing = (ReplaceScalarWithTensorArgPass, ReplaceQuantNodesPass)
    inner = [instead.get(each, each) for each in CortexMPassManager.pass_list if each not in tracing]
    return [tracing[0], *inner, tracing[1]]
