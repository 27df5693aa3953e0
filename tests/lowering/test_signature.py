"""Programs take what their model was exported for; anything else is refused in one sentence, never computed."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.errors import LoweringError
from quantplug.lowering.openvino import OpenVINOProgram
from quantplug.lowering.x86 import X86Program

BACKENDS = ["x86", "xnnpack", "openvino", "native"]
LOADED: dict[str, Any] = {"x86": X86Program, "openvino": OpenVINOProgram}


class Averaged(nn.Module):
    """Averages a map, whose number of pixels a kernel divides by, and adds what a dict holds, as often as told."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x, other, times=2):
        averages = torch.relu(self.conv(x)).mean((2, 3))
        return self.linear(averages) + times * other["y"]


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(0)
    return torch.randn(4, 3, 12, 12), {"y": torch.randn(4, 4)}, 2


def program_of(backend, model, inputs, folder, dynamic_shapes=None):
    if backend == "openvino":
        pytest.importorskip("openvino")
    made = quantplug.quantize(model, inputs, backend, [inputs], dynamic_shapes=dynamic_shapes, progress=False).program
    return LOADED[backend].load(made.save(folder / "saved.pt2")) if backend in LOADED else made


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return Averaged().eval()


@pytest.fixture(scope="module", params=[*BACKENDS, "cortex_m"])
def fixed(request, model, inputs, tmp_path_factory):
    return program_of(request.param, model, inputs, tmp_path_factory.mktemp("fixed"))


@pytest.fixture(scope="module", params=BACKENDS)
def opened(request, model, inputs, tmp_path_factory):
    """A backend's program with an open batch; those of Cortex-M have one shape."""
    dim = torch.export.Dim("batch", min=2, max=8)
    shapes = ({0: dim}, {"y": {0: dim}}, None)
    return program_of(request.param, model, inputs, tmp_path_factory.mktemp("opened"), shapes)


@pytest.mark.slow
def test_what_fits_runs(fixed, model, inputs):
    torch.testing.assert_close(fixed(*inputs), model(*inputs), rtol=0, atol=0.1)


@pytest.mark.few(1)
def test_open_sizes_run(opened, model, inputs):
    torch.testing.assert_close(opened(*inputs), model(*inputs), rtol=0, atol=0.1)
    fewer = (inputs[0][:3], {"y": inputs[1]["y"][:3]}, 2)
    torch.testing.assert_close(opened(*fewer), model(*fewer), rtol=0, atol=0.1)


@pytest.mark.few(1)
def test_what_does_not_fit_is_refused(fixed, inputs):
    x, other, times = inputs
    float32, refused = re.escape("torch.float32 (4, 3, 12, 12)"), r"found torch\.\w+ \([\d, ]+\); pass it so"
    for wrong, message in [
        ((torch.randn(4, 3, 16, 16), other, times), f"Input 0 of the program is {float32}, {refused}"),
        ((x[:2], {"y": other["y"][:2]}, times), f"Input 0 of the program is {float32}, {refused}"),
        ((x.double(), other, times), f"Input 0 of the program is {float32}, found torch.float64"),
        ((x[0], other, times), f"Input 0 of the program is {float32}, {refused}"),
        ((x, {"y": 1.0}, times), r"Input 1 of the program is .*, found float 1\.0"),
        ((x, other, 3), r"Input 2 of the program was 2 when .*, found int 3; export and lower it"),
        ((x, other, 2.0), r"Input 2 of the program was 2 when .*, found float 2\.0; export and lower it"),
        ((x, other), "takes inputs of structure .*; pass them as they were exported"),
        ((x, other, times, x), "takes inputs of structure .*; pass them as they were exported"),
        ((x, {"z": other["y"]}, times), r"takes inputs of structure .*'y'.* found .*'z'.*; pass them"),
    ]:
        with pytest.raises(LoweringError, match=message) as raised:
            fixed(*wrong)
        assert "\n" not in str(raised.value)


@pytest.mark.few(1)
def test_open_sizes_of_one_name_have_to_agree(opened, inputs):
    x, other, times = inputs
    with pytest.raises(LoweringError, match=r"Input 1 of the program is .* with \w+ = 3, found torch.float32 \(4, 4\)"):
        opened(x[:3], other, times)


@pytest.mark.few(1)
@pytest.mark.parametrize("kernels", ["x86", "xnnpack"])
def test_emulations_refuse_it_too(model, inputs, kernels):
    reference = quantplug.quantize(model, inputs, kernels, [inputs], progress=False).reference
    emulated = quantplug.emulate(reference, inputs, kernels)
    torch.testing.assert_close(emulated(*inputs), model(*inputs), rtol=0, atol=0.1)
    with pytest.raises(LoweringError, match="Input 0 of the program is"):
        emulated(torch.randn(4, 3, 16, 16), *inputs[1:])


def test_compiled_programs_refuse_it_too(inputs):
    torch.manual_seed(1)
    program: Any = quantplug.quantize(Averaged().eval(), inputs, "x86", [inputs], progress=False).program
    run = program.compile()
    with pytest.raises(LoweringError, match="Input 0 of the program is"):
        run(torch.randn(4, 3, 16, 16), *inputs[1:])


def test_example_inputs_that_the_graph_does_not_take_are_refused(inputs):
    reference = quantplug.quantize(Averaged().eval(), inputs, "x86", [inputs], progress=False).reference
    with pytest.raises(LoweringError, match="The graph takes 3 flat inputs, the example inputs hold 1"):
        quantplug.get_quantizer("x86").backend.lower(reference, inputs[:1])
