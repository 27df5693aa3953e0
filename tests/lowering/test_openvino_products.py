"""Quantized products of two activations on OpenVINO's integer kernels, also under softmax and sigmoid."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.openvino import OpenVINOProgram
from quantplug.quantizers.framework.derived import derive
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.openvino import INTEGER_PRODUCTS, OPENVINO

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default


class Products(BackendQuantizer):
    """OpenVINO with products of activations in integers."""

    backend = derive(OPENVINO, "openvino_products", add=INTEGER_PRODUCTS)


class Of(nn.Module):
    """A function of two tensors as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, a, b):
        return self.function(a, b)


def program_of(function, calls, strict):
    pytest.importorskip("openvino")
    exported = torch.export.export(Of(function), calls[0], strict=strict).module()
    prepared = quantplug.prepare_pt2e(exported, Products())
    for call in calls:
        prepared(*call)
    reference = quantplug.convert_pt2e(prepared)
    return reference, Products.backend.lower(reference, calls[0])


def kernels(program):
    infos = [node.get_rt_info() for node in program.compiled.get_runtime_model().get_ops()]
    return [(info["layerType"].value, info["runtimePrecision"].value) for info in infos]


FUNCTIONS = {
    "bmm": torch.bmm,
    "matmul": torch.matmul,
    "bmm-softmax": lambda a, b: torch.bmm(a, b).softmax(-1),
    "bmm-sigmoid": lambda a, b: torch.bmm(a, b).sigmoid(),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_r25_r27_products_of_two_activations_run_in_int8_and_nothing_is_rounded_before_what_is_fused(
    name, strict, tmp_path
):
    torch.manual_seed(0)
    calls = [(torch.randn(4, 64, 64), torch.randn(4, 64, 96)) for _ in range(2)]
    reference, program = program_of(FUNCTIONS[name], calls, strict)
    product = next(node for node in reference.graph.nodes if str(node.target).startswith(("aten.bmm", "aten.matmul")))
    assert not [reader for reader in product.users if reader.target is QUANTIZE]
    assert [precision for kind, precision in kernels(program) if kind == "MatMul"] == ["i8"]
    loaded = OpenVINOProgram.load(program.save(tmp_path / "program.zip"))
    for call in calls:
        assert sqnr(reference(*call), program(*call)) > 60
        assert sqnr(FUNCTIONS[name](*call), loaded(*call)) > 24


def test_r25_the_base_backend_and_its_config_are_as_before():
    assert not {label for row in OPENVINO.annotators for label, _ in row.patterns} & {"bmm", "matmul"}
    assert OPENVINO.config("int8") is Products.backend.config("int8")
    assert OPENVINO.config("int8").input_activation.dtype == torch.uint8
