"""Quantization parameters as numbers."""

import pytest
import torch
from torch import fx, nn

from quantplug.core.errors import LoweringError
from quantplug.core.qdq.qparams import QParams, StaticQParams


def test_static_parameters_are_numbers_and_others_are_refused_with_the_remedy():
    assert QParams(0.5, 3, -128, 127, torch.int8).static() == StaticQParams(0.5, 3, -128, 127, torch.int8)
    node = next(iter(fx.symbolic_trace(nn.ReLU()).graph.nodes))
    for scale, zero_point in ((node, 3), (0.5, node)):
        with pytest.raises(LoweringError, match="are computed at run time, where numbers are needed; ask `is_static`"):
            QParams(scale, zero_point, -128, 127, torch.int8).static()
