"""Weights alone in integers: what the saved files take, and that they run without any calibration."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr

SHARE = {"int8_weight_only": 0.26, "int4_weight_only": 0.16}
CASES = [("xnnpack", "int8_weight_only"), ("x86", "int8_weight_only"), ("openvino", "int8_weight_only")]
CASES += [("xnnpack", "int4_weight_only"), ("x86", "int4_weight_only")]
SUFFIX = {"xnnpack": "model.pte", "x86": "model.pt2", "openvino": "model.zip"}


class Gated(nn.Module):
    """The feed-forward half of a language model's block, twelve million weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(1024, 4096, bias=False), nn.Linear(1024, 4096)
        self.down = nn.Linear(4096, 1024, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.few(1)
@pytest.mark.parametrize(("backend", "config"), CASES)
def test_e08_files_of_integer_weights_are_small_and_need_no_data(backend, config, tmp_path):
    if backend == "openvino":
        pytest.importorskip("openvino")
    model, x = Gated().eval(), torch.randn(3, 1024)
    quantizer = quantplug.get_quantizer(backend).set_global(config)
    assert not quantizer.needs_calibration
    prepared = quantplug.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    observers = [node for node in prepared.graph.find_nodes(op="call_module") if node.target != "_guards_fn"]
    assert {node.all_input_nodes[0].op for node in observers} == {"get_attr"}, "nothing but weights is observed"
    artefact = quantplug.quantize(model, (x,), quantizer, progress=False)
    path = artefact.save(tmp_path / SUFFIX[backend])
    floats = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert path.stat().st_size <= SHARE[config] * floats
    for _ in range(2):
        x = torch.randn(3, 1024)
        assert sqnr(artefact(x), artefact.reference(x)) > 40
        assert sqnr(artefact(x), model(x)) > (30 if config == "int8_weight_only" else 12)
