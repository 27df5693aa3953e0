"""Graphs spelled plainly: one operator for what exports write in several ways, and the very same numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quantplug
from quantplug.core.graph.facts import compute_nodes
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.starting import starting
from quantplug.plugin import (
    Backend,
    BackendQuantizer,
    binary,
    convolution,
    get_symmetric_quantization_config,
    linear,
    lower_to_reference,
    pooling,
    transposed_convolution,
)


class PlainQuantizer(BackendQuantizer):
    """Quantizes what has several spellings."""

    backend = Backend(
        "plain",
        (
            convolution((1, 2, 3)),
            transposed_convolution((1, 2, 3)),
            linear(),
            pooling("max_pool1d"),
            pooling("max_pool2d"),
            pooling("max_pool3d"),
            pooling("avg_pool2d", own_output=True),
            pooling("mean", own_output=True),
            binary("add"),
        ),
        configs={
            "int8": lambda is_qat=False: get_symmetric_quantization_config(True),
            "whole": lambda is_qat=False: get_symmetric_quantization_config(False),
            "dynamic": lambda is_qat=False: get_symmetric_quantization_config(True, is_dynamic=True),
        },
        lowering=lower_to_reference,
    )


class Calls(nn.Module):
    """A function of inputs and held tensors."""

    def __init__(self, function, *sizes):
        super().__init__()
        self.held = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])
        self.function = function

    def forward(self, x):
        return self.function(x, *self.held)


IMAGE, ROWS = (3, 4, 9, 8), (3, 6)
MODELS = {
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, groups=2), (3, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3, dilation=2, bias=False), IMAGE),
    "conv3d": (nn.Conv3d(2, 3, 2, padding=1), (3, 2, 5, 4, 4)),
    "crossed1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (3, 4, 9)),
    "crossed2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, padding=1), IMAGE),
    "crossed3d": (nn.ConvTranspose3d(2, 3, 2, dilation=2), (3, 2, 5, 4, 4)),
    "same1d": (nn.Conv1d(4, 6, 3, padding="same"), (3, 4, 9)),
    "same2d": (nn.Conv2d(4, 4, (3, 5), padding="same", dilation=(1, 2), groups=4), IMAGE),
    "uneven": (nn.Conv2d(4, 6, (2, 3), padding="same"), IMAGE),
    "valid": (nn.Conv2d(4, 6, 3, padding="valid"), IMAGE),
    "one number": (Calls(lambda x, w: torch.ops.aten.conv2d.default(x, w, None, [2], [1], [1]), (6, 4, 3, 3)), IMAGE),
    "linear": (nn.Linear(6, 5), ROWS),
    "without bias": (nn.Linear(6, 5, bias=False), ROWS),
    "of three dimensions": (nn.Linear(6, 5), (3, 4, 6)),
    "addmm": (Calls(lambda x, m, b: torch.addmm(b, x, m), (6, 5), (5,)), ROWS),
    "scaled addmm": (Calls(lambda x, m, b: torch.addmm(b, x, m, beta=2), (6, 5), (5,)), ROWS),
    "mm": (Calls(lambda x, m: x.mm(m), (6, 5)), ROWS),
    "turned": (Calls(lambda x, m: x.mm(m.transpose(-1, 0)), (5, 6)), ROWS),
    "permuted": (Calls(lambda x, m: x.mm(m.permute(1, 0)), (5, 6)), ROWS),
    "not permuted": (Calls(lambda x, m: x.mm(m.permute(0, 1)), (6, 5)), ROWS),
    "matmul": (Calls(lambda x, m: x @ m.t(), (5, 6)), (3, 4, 6)),
    "max_pool1d": (nn.MaxPool1d(3), (3, 4, 9)),
    "max_pool2d": (nn.MaxPool2d(3, 2, 1), IMAGE),
    "max_pool3d": (nn.MaxPool3d(2), (3, 2, 5, 4, 4)),
    "positions": (Calls(lambda x: F.max_pool2d(x, 2, return_indices=True)), IMAGE),
    "avg_pool2d": (nn.AvgPool2d(2), IMAGE),
    "mean": (Calls(lambda x: x.mean((-1, 2))), IMAGE),
}
PLAIN = {
    "uneven": "conv2d.default",
    "scaled addmm": "addmm.default",
    "positions": "max_pool2d_with_indices.default",
    "one number": "conv2d.default",
    "valid": "conv2d.default",
    **{f"same{dims}d": f"conv{dims}d.default" for dims in (1, 2)},
    **{f"conv{dims}d": f"conv{dims}d.default" for dims in (1, 2, 3)},
    "crossed1d": "conv_transpose1d.default",
    **{f"crossed{dims}d": f"conv_transpose{dims}d.input" for dims in (2, 3)},
    **dict.fromkeys(
        ("linear", "without bias", "of three dimensions", "addmm", "mm", "turned", "permuted", "not permuted"),
        "linear.default",
    ),
    **{f"max_pool{dims}d": f"max_pool{dims}d.default" for dims in (2, 3)},
    "avg_pool2d": "avg_pool2d.default",
    "mean": "mean.dim",
}
# Scales of matrices turn with them: one for all, one by channel, and beside activations that are not quantized yet.
PRODUCTS = ("scaled addmm", "matmul", *(name for name, operator in PLAIN.items() if operator == "linear.default"))
CASES = [
    *((name, "int8") for name in MODELS),
    *((name, config) for name in PRODUCTS for config in ("whole", "dynamic")),
    ("uneven", "dynamic"),
]


def qdq_graph(name, config, is_open, is_decomposed):
    torch.manual_seed(0)
    model, sizes = MODELS[name]
    x = torch.randn(sizes)
    shapes = {"input": {0: torch.export.Dim("batch", min=2, max=64)}} if is_open else None
    exported = torch.export.export(nn.Sequential(model).eval(), (x,), dynamic_shapes=shapes)
    exported = exported.run_decompositions() if is_decomposed else exported
    quantizer = PlainQuantizer(strict=False).set_global(PlainQuantizer.backend.config(config))
    prepared = quantplug.prepare_pt2e(exported.module(), quantizer)
    prepared(x)
    return quantplug.convert_pt2e(prepared), x


@pytest.mark.few(5)
@pytest.mark.filterwarnings("ignore:PlainQuantizer quantizes none")
@pytest.mark.parametrize("is_decomposed", [False, True], ids=["whole", "decomposed"])
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize(("name", "config"), CASES)
def test_a_graph_spelled_plainly_computes_the_same_numbers(name, config, is_open, is_decomposed):
    graph, x = qdq_graph(name, config, is_open, is_decomposed)
    plain = starting(graph)
    spell_plainly(plain.graph)
    plain.graph.lint()
    plain.recompile()
    for given in (x, torch.cat((x, x + 1)) if is_open else 2 * x):
        found, expected = plain(given), graph(given)
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        # Results of "dynamic" are floats of another kernel of torch, which some processors sum in another order.
        rtol, atol = (1e-5, 1e-6) if config == "dynamic" else (0.0, 0.0)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    left = {str(node.target).removeprefix("aten.") for node in compute_nodes(plain.graph)}
    wanted = PLAIN.get(name)
    if wanted and not (config == "dynamic" and name == "uneven"):
        assert wanted in left
    unspelled = {"convolution.default", "mm.default", "addmm.default", "max_pool2d_with_indices.default"}
    assert left & unspelled <= {wanted}
