"""One scale a row as a spec: made, shared, checked, planned, reported, trained and converted."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import PerAxis, PerToken, PlaceholderObserver
from torchao.quantization.pt2e import quantize_pt2e as torchao
from torchao.quantization.pt2e.quantizer import QuantizationSpec

import quantplug
from quantplug.annotators.presets import get_symmetric_quantization_config, per_row, row_spec
from quantplug.core.annotation.plan import Plan, plan_of
from quantplug.core.annotation.verify import verify_annotations
from quantplug.core.errors import AnnotationError, ConfigError
from quantplug.core.observers.rowwise import RowFakeQuantize, RowObserver, granularity_of, quantize_dequantize
from quantplug.core.observers.sharing import observer_key, tensor_key
from quantplug.core.qdq.format import is_reference_quantized, reference_defects
from quantplug.core.specs.levels import sqnr

TENSOR = QuantizationSpec(torch.int8, PlaceholderObserver, -128, 127, torch.per_tensor_affine, is_dynamic=True)


class Both(nn.Module):
    """A convolution and a linear layer."""

    def __init__(self):
        super().__init__()
        self.image, self.line = nn.Conv2d(3, 4, 3), nn.Linear(6, 5)

    def forward(self, x):
        return self.line(torch.relu(self.image(x)))


def inputs() -> torch.Tensor:
    return torch.randn(5, 3, 8, 8) * torch.logspace(2, -2, 5).reshape(-1, 1, 1, 1)


def exported(model: nn.Module, x: torch.Tensor):
    return torch.export.export(model, (x,)).module()


def xnnpack(**options):
    return quantplug.get_quantizer("xnnpack").set_global(
        quantplug.get_quantizer("xnnpack").backend.config("int8_dynamic", **options)
    )


def test_the_spec_is_one_object_and_no_other_granularity_shares_its_observer():
    assert row_spec() is row_spec()
    assert granularity_of(row_spec()) == PerToken()
    assert granularity_of(TENSOR) is None
    samples = row_spec(granularity=PerAxis(0))
    assert len({tensor_key(spec) for spec in (TENSOR, row_spec(), samples)}) == 3
    again = replace(row_spec(), observer_or_fake_quant_ctr=RowObserver.with_args(granularity=PerToken()))
    of_config = per_row(get_symmetric_quantization_config(is_dynamic=True)).input_activation
    for spec in (again, of_config):
        assert (tensor_key(spec), observer_key(spec)) == (tensor_key(row_spec()), observer_key(row_spec()))
    assert observer_key(samples) != observer_key(row_spec())


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: row_spec(granularity=PerAxis(1)), r"granularity PerAxis\(axis=1\); choose PerToken"),
        (lambda: RowObserver(granularity=None), "granularity None; choose PerToken"),
        (lambda: RowObserver(dtype=torch.uint8), "of torch.uint8; the operators take -128..127 of torch.int8"),
        (lambda: RowFakeQuantize(quant_min=-127), "integers -127..127 of torch.int8"),
        (lambda: RowObserver(qscheme=torch.per_tensor_symmetric), "has the qscheme torch.per_tensor_symmetric"),
        (lambda: per_row(get_symmetric_quantization_config()), "activations that are not dynamic"),
        (lambda: per_row(get_symmetric_quantization_config(is_dynamic=True, act_qmin=0)), "chosen at run time"),
    ],
)
def test_what_no_operator_chooses_is_refused(made, match):
    with pytest.raises(ConfigError, match=match):
        made()


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (replace(row_spec(), is_dynamic=False), "and not as dynamic; give the spec is_dynamic=True"),
        (replace(row_spec(), dtype=torch.uint8, quant_min=0, quant_max=255), "rows take torch.int8"),
    ],
)
def test_the_verifier_names_the_input(spec, match):
    model = exported(nn.Linear(4, 4), torch.randn(2, 4))
    config = replace(per_row(get_symmetric_quantization_config(True, is_dynamic=True)), input_activation=spec)
    quantizer = quantplug.get_quantizer("xnnpack").set_global(config)
    with pytest.raises(AnnotationError, match=f"input '.*' of .*linear.*{match}"):
        verify_annotations(quantizer.annotate(model))


def test_plans_carry_rows_and_samples_through_json():
    x = inputs()
    model = exported(Both().eval(), x)
    plan = plan_of(xnnpack().annotate(exported(Both().eval(), x)))
    read = Plan.from_json(plan.json())
    assert read == plan
    read.quantizer().annotate(model)
    found = {
        node.name: granularity_of(next(iter(node.meta["quantization_annotation"].input_qspec_map.values())))
        for node in model.graph.nodes
        if node.name in ("conv2d", "linear")
    }
    assert found == {"conv2d": PerAxis(0), "linear": PerToken()}


def test_reports_say_per_row_and_per_sample_before_and_after_convert():
    torch.manual_seed(0)
    prepared = quantplug.prepare_pt2e(exported(Both().eval(), inputs()), xnnpack())
    for model in (prepared, quantplug.convert_pt2e(prepared)):
        report = quantplug.explain(model)
        assert report.row("linear").how.startswith("dynamic int8 per row, int8 per channel -> float")
        assert report.row("conv2d").how.startswith("dynamic int8 per sample, int8 per channel -> ")


def test_torchaos_own_convert_and_the_integer_representation_say_the_same():
    torch.manual_seed(0)
    x, model = inputs(), Both().eval()
    prepared = quantplug.prepare_pt2e(exported(model, x), xnnpack())
    ours = quantplug.convert_pt2e(prepared)
    integers = quantplug.convert_pt2e(prepared, use_reference_representation=True)
    theirs = torchao.prepare_pt2e(exported(model, x), xnnpack())
    theirs(x)
    theirs = torchao.convert_pt2e(theirs)
    for values in (x, x.flip(0)):
        for row in range(len(values)):
            assert sqnr(ours(values)[row], model(values)[row]) > 30.0
            assert sqnr(theirs(values)[row], ours(values)[row]) > 100.0
            assert sqnr(integers(values)[row], ours(values)[row]) > 100.0
    targets = [str(n.target) for n in integers.graph.nodes]
    assert "quantized_decomposed.dequantize_per_token.default" not in targets


@pytest.mark.parametrize("granularity", [PerToken(), PerAxis(0)])
def test_q16_fake_quantization_rounds_each_row_and_passes_gradients(granularity):
    torch.manual_seed(0)
    x = inputs().requires_grad_()
    fake = RowFakeQuantize(granularity)
    found = fake(x)
    assert torch.allclose(found, quantize_dequantize(x.detach(), granularity), rtol=1e-6, atol=0)
    assert not torch.equal(found, x)
    found.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))
    fake.disable_fake_quant()
    assert fake(x) is x


@pytest.mark.parametrize("options", [{}, {"is_qat": True}], ids=["the default's observer", "a fake quantize"])
def test_q16_dynamic_training_sees_the_rows_that_the_program_will_have(options):
    torch.manual_seed(0)
    x = inputs()
    prepared = quantplug.prepare_qat_pt2e(exported(Both(), x), xnnpack(**options))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-6)
    for _ in range(2):
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    trained = prepared(x)
    converted = quantplug.convert_pt2e(prepared)
    for row in range(len(x)):
        assert sqnr(converted(x)[row], trained[row].detach()) > 35.0
    assert "per row" in quantplug.explain(converted).row("linear").how


@pytest.mark.parametrize("config", ["int8_dynamic", "int4_dynamic_groups"])
def test_a_graph_of_scales_by_row_is_a_reference_quantized_model(config):
    x = torch.randn(4, 64)
    prepared = quantplug.prepare_pt2e(
        exported(nn.Linear(64, 8), x), quantplug.get_quantizer("xnnpack").set_global(config)
    )
    converted = quantplug.convert_pt2e(prepared)
    assert any("token" in str(node.target) for node in converted.graph.nodes)
    assert reference_defects(converted) == []
    assert is_reference_quantized(converted)


class LastStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 8)

    def forward(self, x):
        return self.linear(x[:, -1:])


@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
def test_the_last_step_of_a_sequence_of_open_length(backend):
    model, x = LastStep().eval(), torch.randn(1, 6, 32)
    shapes = ({1: torch.export.Dim("n", min=1, max=16)},)
    artefact = quantplug.quantize(model, (x,), backend, config="int8_dynamic", dynamic_shapes=shapes, progress=False)
    for length in (1, 6, 16, 1):
        x = torch.randn(1, length, 32)
        assert quantplug.sqnr(artefact(x), model(x)) > 30
