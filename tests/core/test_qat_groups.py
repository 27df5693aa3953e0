"""Weights with a scale for each group are trained: what is trained is what the lowered program computes."""

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.runtime import Runtime
from sklearn.datasets import load_digits
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import (
    MappingType,
    PerAxis,
    PerGroup,
    disable_fake_quant,
    enable_fake_quant,
    quantize_pt2e,
)

import quantplug
from quantplug import Plan, get_quantizer, plan_of
from quantplug.core.errors import AnnotationError, ConfigError
from quantplug.core.observers.groups import GroupFakeQuantize, GroupLearnedStepFakeQuantize
from quantplug.core.peers.torchao_names import AffineQuantizedMinMaxObserver
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.x86 import X86Program

BATCH = ({0: torch.export.Dim("batch", min=1, max=2048)},)
# A program's roundings beside those of its graph: scales in bfloat16 in a .pte, activations in bfloat16 on x86.
LEAST = 45
TARGETS = [("xnnpack", "8da4w", 32), ("x86", "int4_weight_only", 64)]


class Tied(nn.Module):
    """Three layers, of which two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.one = nn.Linear(64, 128), nn.Linear(128, 128)
        self.two = nn.Linear(128, 128, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.two(torch.relu(x + self.one(x)))


def digits() -> tuple[Tensor, Tensor]:
    found = torch.tensor(load_digits(return_X_y=True)[0], dtype=torch.float32) / 16
    return found[:1200], found[1200:]


def compressor() -> nn.Module:
    torch.manual_seed(0)
    halves = (nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)), (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64))
    return nn.Sequential(*halves[0], *halves[1])


def trained(module: Any, steps: int, rate: float) -> Any:
    torch.manual_seed(1)
    images, optimizer = digits()[0], torch.optim.Adam(module.parameters(), lr=rate)
    for _ in range(steps):
        some = images[torch.randint(0, len(images), (64,))]
        optimizer.zero_grad()
        F.mse_loss(module(some), some).backward()
        optimizer.step()
    return module


def exported(module: nn.Module, x: Tensor, strict: bool = False) -> fx.GraphModule:
    return torch.export.export(copy.deepcopy(module), (x,), dynamic_shapes=BATCH, strict=strict).module()


def quantizer_for(backend: str, config: str, size: int, **options: Any) -> Any:
    quantizer = get_quantizer(backend)
    return quantizer.set_global(quantizer.backend.config(config, group_size=size, **options))


def loaded(backend: str, path: Any) -> list[Any]:
    """Returns a saved program as its own runtime runs it, called once before."""
    if backend == "x86":
        return [X86Program.load(path)]
    method = Runtime.get().load_program(str(path)).load_method("forward")
    assert method is not None
    method.execute([torch.randn(2, 64)])
    return [lambda x: method.execute([x])[0]]


def by_hand(weight: Tensor, size: int) -> Tensor:
    """Returns a weight as -8..7 scales of each group of a row stand for it."""
    rows = weight.reshape(-1, size)
    scale = rows.abs().amax(1, keepdim=True) / 7.5
    return ((rows * (1 / scale)).round().clamp(-8, 7) * scale).reshape(weight.shape)


@pytest.mark.few(2)
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize(("backend", "config", "size"), TARGETS)
def test_the_lowered_program_computes_what_was_trained(
    backend: str, config: str, size: int, strict: bool, tmp_path: Any
) -> None:
    x, other = torch.randn(6, 64), torch.randn(9, 64)
    module, quantizer = Tied(), quantizer_for(backend, config, size)
    qat = quantplug.prepare_qat_pt2e(exported(module, x, strict), quantizer)
    assert sqnr(qat(x), module(x)) < 30, "nothing is rounded before training"
    before = copy.deepcopy(qat.state_dict())
    optimizer = torch.optim.SGD(qat.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        qat(x).square().mean().backward()
        optimizer.step()
    weights = [name for name in before if name.endswith("weight")]
    assert not any(torch.equal(before[name], qat.state_dict()[name]) for name in weights)
    converted = quantplug.convert_pt2e(qat)  # as the last step left it: no forward shows it the newest weights
    expected = qat.eval()(other)
    assert torch.equal(converted(other), expected)
    names = [name for name, _ in converted.named_buffers() if name.endswith("_quantized")]
    assert len(names) == 2, "the weight of two layers is stored once"
    program = quantizer.backend.lower(converted, (x,))
    for run in (program, program, *loaded(backend, program.save(tmp_path / "model.pt2"))):
        assert sqnr(run(other), expected) > LEAST
    assert {operator.placement for operator in program.ops if "linear" in operator.target} == {"int8"}


@pytest.mark.parametrize(("backend", "config"), [each[:2] for each in TARGETS])
@pytest.mark.few(1)
def test_training_with_groups_loses_less_than_rounding_after_it(backend: str, config: str) -> None:
    """Of equally many steps on real images, measured on the lowered programs and images that nobody trained on."""
    images, unseen = digits()
    quantizer, model = quantizer_for(backend, config, 32), trained(compressor(), 400, 3e-3)
    floats = trained(copy.deepcopy(model), 150, 1e-3)
    observed = quantplug.prepare_pt2e(exported(floats, images[:64]), quantizer)
    observed(images[:64])
    qat = trained(quantplug.prepare_qat_pt2e(exported(model, images[:64]), quantizer), 150, 1e-3)
    losses = []
    for prepared in (observed, qat.eval()):
        program = quantizer.backend.lower(quantplug.convert_pt2e(prepared), (images[:64],))
        losses.append([float(F.mse_loss(program(part), part)) for part in (images, unseen)])
    (rounded, rounded_unseen), (learned, learned_unseen) = losses
    assert learned < 0.85 * rounded
    assert learned_unseen < 0.9 * rounded_unseen


@pytest.mark.parametrize("size", [32, 64, 128])
def test_groups_are_rounded_by_their_own_scales_with_gradients_of_the_float_layer(size: int) -> None:
    x, layer = torch.randn(3, 128), nn.Linear(128, 16, bias=False)
    qat = quantplug.prepare_qat_pt2e(exported(layer, x), quantizer_for("x86", "int4_weight_only", size))
    found = qat(x)
    assert sqnr(found, x @ by_hand(layer.weight.detach(), size).T) > 110
    found.sum().backward()
    (weight,) = qat.parameters()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(16, 128))
    qat.apply(disable_fake_quant)
    assert torch.equal(qat(x), layer(x))
    qat.apply(enable_fake_quant)
    assert torch.equal(qat(x), found)


def test_activations_have_a_scale_a_row_in_training_too() -> None:
    x = torch.randn(4, 64)
    qat = quantplug.prepare_qat_pt2e(exported(nn.Linear(64, 8), x), quantizer_for("xnnpack", "8da4w", 32))
    louder = torch.cat([x[:3], 1000 * x[3:]])
    assert torch.equal(qat(x)[:3], qat(louder)[:3])
    x.requires_grad_()
    qat(x).sum().backward()
    assert x.grad is not None
    assert bool((x.grad != 0).all())


def test_a_state_that_was_saved_in_training_goes_on() -> None:
    images, quantizer = digits()[0], quantizer_for("xnnpack", "8da4w", 32)
    qat, again = (quantplug.prepare_qat_pt2e(exported(compressor(), images[:8]), quantizer) for _ in range(2))
    buffer = io.BytesIO()
    torch.save(trained(qat, 5, 1e-3).state_dict(), buffer)
    buffer.seek(0)
    again.load_state_dict(torch.load(buffer))
    assert torch.equal(again(images), qat(images))
    both = [quantplug.convert_pt2e(trained(each, 3, 1e-3)) for each in (qat, again)]
    assert torch.equal(both[0](images), both[1](images))


def test_the_config_for_training_serves_torchaos_own_way() -> None:
    x = torch.randn(5, 64)
    quantizer = quantizer_for("x86", "int4_weight_only", 32, is_qat=True)
    theirs = quantize_pt2e.prepare_qat_pt2e(exported(Tied(), x), quantizer)
    ours = quantplug.prepare_qat_pt2e(exported(Tied(), x), quantizer)
    assert torch.equal(theirs(x), ours(x))
    assert sqnr(theirs(x), Tied()(x)) < 30
    expected = ours(x)
    assert sqnr(quantize_pt2e.convert_pt2e(theirs)(x), expected) > 110
    plan = plan_of(ours)
    replayed = quantplug.prepare_qat_pt2e(exported(Tied(), x), Plan.from_json(plan.json()).quantizer())
    assert torch.equal(replayed(x), expected)


class Tokens(nn.Module):
    """A table that is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle, self.head = nn.Embedding(96, 64), nn.Linear(64, 64), nn.Linear(64, 96, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.middle(self.table(ids))))


def test_a_table_in_groups_that_is_the_head_too_is_trained_and_stored_once() -> None:
    ids = torch.randint(0, 96, (2, 5))
    quantizer: Any = get_quantizer("xnnpack").set_global("8da4w").set_operator_type("embedding", "int4_groups")
    qat = quantplug.prepare_qat_pt2e(torch.export.export(Tokens(), (ids,)).module(), quantizer)
    assert sqnr(qat(ids), Tokens()(ids)) < 30
    optimizer = torch.optim.Adam(qat.parameters(), 1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(qat(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    converted = quantplug.convert_pt2e(qat)
    expected = qat.eval()(ids)
    assert torch.equal(converted(ids), expected)
    assert sum(name.endswith("_quantized") for name, _ in converted.named_buffers()) == 2
    program = quantizer.backend.lower(converted, (ids,))
    for _ in range(2):
        assert sqnr(program(ids), expected) > 40


def learned_steps(quantizer: Any, config: str) -> Any:
    """Lets a quantizer learn the steps of its groups of 32."""
    given = quantizer.backend.config(config)
    constructor = GroupLearnedStepFakeQuantize.with_args(granularity=PerGroup(32))
    return quantizer.set_global(replace(given, weight=replace(given.weight, observer_or_fake_quant_ctr=constructor)))


@pytest.mark.slow
def test_steps_of_groups_are_learned_and_lowered() -> None:
    x, quantizer = torch.randn(6, 64), learned_steps(get_quantizer("xnnpack"), "8da4w")
    qat = quantplug.prepare_qat_pt2e(exported(Tied(), x), quantizer)
    qat(x)
    steps = {name: found for name, found in qat.named_parameters() if name.endswith("scale")}
    assert {found.numel() for found in steps.values()} == {128 * 2, 128 * 4}
    before = {name: found.detach().clone() for name, found in steps.items()}
    optimizer = torch.optim.SGD(qat.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        qat(x).square().mean().backward()
        optimizer.step()
    assert not any(torch.equal(before[name], found) for name, found in steps.items())
    expected = qat.eval()(x)
    converted = quantplug.convert_pt2e(qat)
    assert sqnr(converted(x), expected) > 110
    again = quantplug.prepare_qat_pt2e(exported(Tied(), x), learned_steps(get_quantizer("xnnpack"), "8da4w")).eval()
    again.load_state_dict(qat.state_dict())
    assert torch.equal(again(x), expected)
    assert sqnr(quantizer.backend.lower(converted, (x,))(x), expected) > LEAST


def test_what_has_no_form_for_training_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"granularity PerAxis\(axis=0\); pass PerGroup"):
        GroupLearnedStepFakeQuantize(PerAxis(0))
    x, spec = torch.randn(2, 64), quantizer_for("xnnpack", "8da4w", 32).backend.config("8da4w").weight

    class OnActivations(quantplug.BackendQuantizer):
        backend = get_quantizer("x86").backend

        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

            for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
                node.meta["quantization_annotation"] = QuantizationAnnotation({node.args[0]: spec})
            return model

    with pytest.raises(AnnotationError, match="scales of blocks are found in weights only; give it a spec"):
        quantplug.prepare_qat_pt2e(exported(nn.Linear(64, 8), x), OnActivations())


def test_an_empty_weight_passes() -> None:
    options = {"mapping_type": MappingType.SYMMETRIC, "target_dtype": torch.int8, "granularity": PerGroup(32)}
    found = GroupFakeQuantize(AffineQuantizedMinMaxObserver, **options)
    empty = torch.empty(0, 64)
    assert found(empty) is empty
