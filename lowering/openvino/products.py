"""Products of constants, such as that of an initial state and a weight, computed once and here.

OpenVINO keeps such a product where the weight is converted from float16, computes it when the model is compiled, and
lets what follows write into its memory: the second call is wrong. Where the weight is of integers it compiles nothing.
Seen with OpenVINO 2026.4.
"""

from typing import Any

import torch
from torch import Tensor

_RANDOM = ("RandomUniform", "Multinomial")


def fold_products(model: Any) -> None:
    """Puts constants in the place of the products of constants of an `openvino.Model`."""
    constant: set[str] = set()
    for node in model.get_ordered_ops():
        sources = [source.get_node().get_name() for source in node.input_values()]
        computed = bool(sources) and constant.issuperset(sources) and node.get_type_name() not in _RANDOM
        if computed or node.get_type_name() == "Constant":
            constant.add(node.get_name())
        if computed and node.get_type_name() == "MatMul":
            _fold(node)


def _fold(node: Any) -> None:
    from openvino import opset13

    left, right = (_value(source) for source in node.input_values())
    given = node.get_attributes()
    left = left.mT if given["transpose_a"] and left.dim() > 1 else left
    right = right.mT if given["transpose_b"] and right.dim() > 1 else right
    folded = opset13.constant(torch.matmul(left, right).numpy())
    folded.set_friendly_name(node.get_friendly_name())
    node.output(0).replace(folded.output(0))


def _value(source: Any) -> Tensor:
    """Returns what an operator of constants yields, in float32."""
    import openvino

    compiled = openvino.compile_model(openvino.Model([source], []), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([])[0].copy()).to(torch.float32)
