"""What XNNPACK's programs run in float is what the report says is not quantized, for the reasons that it gives."""

import pytest
import torch
import xnnpack_models
from extras import torchvision_models, transformers_module
from models import Function
from test_tables import FEW_BLOCKS, few_blocks, keyword_spotter
from told import told
from torch import nn
from torch.nn import functional as F

import quantplug

CONFIGS = tuple(quantplug.get_quantizer("xnnpack").backend.configs)
QUICK = {("LSTM", "int8"), ("LSTM", "float16")}
OF_TABLES = ("int4_groups", "int8_groups")
# In int8 `test_tables.py` has all models of the tables; these have each operator that another config treats otherwise.
CASES = [
    *((name, config) for name in ("kws_dscnn", "LSTM") for config in CONFIGS if config not in OF_TABLES),
    *(("bert", config) for config in CONFIGS),
    *((name, "int8_dynamic") for name in ("mobilenet_v3_small", "convnext_tiny")),
    *((name, "float16") for name in ("vit", "convnext_tiny")),
]
BATCH, LENGTH = torch.export.Dim("batch", max=8), torch.export.Dim("length", max=32)


def of_the_benchmark(name):
    """A model of the benchmark; networks of equal blocks have fewer of them."""
    if name == "kws_dscnn":
        model, sample = keyword_spotter()
        return model, sample()
    if name in ("LSTM", "GRU"):
        torch.manual_seed(0)
        return xnnpack_models.Recurrent(name).eval(), xnnpack_models.sequences(1, 2, 32)(0)
    if name == "bert":
        transformers_module()
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
        return xnnpack_models.language("Bert", **sizes).eval(), xnnpack_models.tokens(16)(0)
    models = torchvision_models()
    if name in FEW_BLOCKS:
        return few_blocks(name)[0], xnnpack_models.images(64)(0)
    sample = xnnpack_models.images(32 if name == "vit" else 64)
    if name != "vit":
        return xnnpack_models.make(name, 64, 0)[0], sample(0)
    torch.manual_seed(0)
    small = models.VisionTransformer(32, 16, 2, 4, 64, 128, num_classes=10)
    return xnnpack_models.with_statistics(small, sample), sample(0)


def quantized(model, inputs, config="int8", shapes=None):
    needs = quantplug.get_quantizer("xnnpack").set_global(config).needs_calibration
    batches = [inputs] if needs else None
    return quantplug.quantize(model, inputs, "xnnpack", batches, config, dynamic_shapes=shapes, progress=False)


@pytest.mark.parametrize(
    ("name", "config"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_program_runs_in_float_what_the_report_says_and_for_that_reason(name, config):
    model, inputs = of_the_benchmark(name)
    artefact = quantized(model, inputs, config)
    report, program = told(artefact)
    assert report == program
    assert all(report.values())


def twice(middle, dims=2):
    """Returns a model of two integer layers with something between them."""
    torch.manual_seed(0)
    layer = nn.Linear if dims == 0 else nn.Conv2d
    options = (8, 8) if dims == 0 else (8, 8, 1)
    return Function(middle, one=layer(*options), two=layer(*options), deep=nn.Conv2d(8, 8, 7, 1, 3, groups=8)).eval()


IMAGE, ROWS = (2, 8, 9, 9), (2, 6, 8)
LIMITED = {
    "a mean of open batches": (
        twice(lambda m, x: m.two(F.adaptive_avg_pool2d(m.one(x), 1))),
        IMAGE,
        ({0: BATCH},),
        "'mean': XNNPACK's integer mean is wrong in calls that are larger than an earlier one, and its size is open",
    ),
    "reshapes of two open sizes": (
        twice(lambda m, x: m.two(m.one(x).unsqueeze(1).squeeze(1)), 0),
        ROWS,
        ({0: BATCH, 1: LENGTH},),
        "'squeeze': 2 of its sizes are open, and XNNPACK reshapes with at most one; export the others static",
    ),
    "a large depthwise kernel": (
        twice(lambda m, x: m.two(m.deep(m.one(x)))),
        IMAGE,
        None,
        "'conv': XNNPACK's depthwise kernels end at 25 taps; in float parts it is faster",
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LIMITED)
def test_what_kernels_do_not_take_is_told_before_calibration(name):
    model, shape, shapes, reason = LIMITED[name]
    inputs = (torch.randn(shape),)
    exported = torch.export.export(model, inputs, dynamic_shapes=shapes and (shapes,)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack"))
    before = {row.node: row.reason for row in quantplug.explain(prepared).rows if not row.quantized}
    report, program = told(quantized(model, inputs, shapes=shapes and (shapes,)))
    assert before == report == program
    assert f"nearest rule {reason}" in before.values()


class InPlace(nn.Module):
    """Dropouts and activations in place, between layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 8), nn.Hardswish(True), nn.Dropout(0.5, True), nn.Linear(8, 8), nn.ReLU(True), nn.Linear(8, 8)
        )

    def forward(self, x):
        return self.layers(x)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["int8", "int8_dynamic", "int8_weight_only"])
def test_what_stands_behind_a_layer_is_float_where_its_result_is(config):
    artefact = quantized(InPlace().eval(), (torch.randn(4, 8),), config)
    report, program = told(artefact)
    assert report == program
    activations = set() if config == "int8" else {"hardswish_", "dropout_", "relu_"}
    assert set(report) == activations
    assert config == "int8" or report["relu_"] == "nearest rule 'linear_relu': the layer before it yields floats"


@pytest.mark.slow
def test_a_program_lists_the_operators_of_the_graph_and_none_that_legalization_wrote():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
    artefact = quantized(model, (torch.randn(1, 3, 8, 8),), "int8_weight_only")
    assert [op.target for op in artefact.program.ops] == [
        f"aten.{name}" for name in ("conv2d.default", "flatten.using_ints", "linear.default")
    ]
    assert [op.placement for op in artefact.program.ops] == ["int8", "float", "int8"]
