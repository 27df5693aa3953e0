"""Programs take what their model was exported for; anything else is refused in one sentence, never computed."""

import re

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.errors import LoweringError
from quantplug.lowering.openvino import OpenVINOProgram
from quantplug.lowering.x86 import X86Program

BACKENDS = ["x86", "xnnpack", "openvino"]
LOADED = {"x86": X86Program, "openvino": OpenVINOProgram}


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


@pytest.fixture(scope="module", params=BACKENDS)
def case(request, inputs, tmp_path_factory):
    """A backend's program with a fixed and with an open batch, and the model."""
    if request.param == "openvino":
        pytest.importorskip("openvino")
    torch.manual_seed(1)
    model, dim = Averaged().eval(), torch.export.Dim("batch", min=2, max=8)
    shapes = ({0: dim}, {"y": {0: dim}}, None)
    programs = []
    for number, dynamic_shapes in enumerate((None, shapes)):
        made = quantplug.quantize(
            model, inputs, request.param, [inputs], dynamic_shapes=dynamic_shapes, progress=False
        ).program
        if request.param in LOADED:
            made = LOADED[request.param].load(made.save(tmp_path_factory.mktemp("saved") / f"{number}.pt2"))
        programs.append(made)
    return model, *programs


def test_what_fits_runs(case, inputs):
    model, fixed, opened = case
    torch.testing.assert_close(fixed(*inputs), model(*inputs), rtol=0, atol=0.1)
    torch.testing.assert_close(opened(*inputs), model(*inputs), rtol=0, atol=0.1)
    fewer = (inputs[0][:3], {"y": inputs[1]["y"][:3]}, 2)
    torch.testing.assert_close(opened(*fewer), model(*fewer), rtol=0, atol=0.1)


def test_what_does_not_fit_is_refused(case, inputs):
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
            case[1](*wrong)
        assert "\n" not in str(raised.value)


def test_open_sizes_of_one_name_have_to_agree(case, inputs):
    x, other, times = inputs
    with pytest.raises(LoweringError, match=r"Input 1 of the program is .* with \w+ = 3, found torch.float32 \(4, 4\)"):
        case[2](x[:3], other, times)


def test_compiled_programs_refuse_it_too(inputs):
    torch.manual_seed(1)
    run = quantplug.quantize(Averaged().eval(), inputs, "x86", [inputs], progress=False).program.compile()
    with pytest.raises(LoweringError, match="Input 0 of the program is"):
        run(torch.randn(4, 3, 16, 16), *inputs[1:])


def test_example_inputs_that_the_graph_does_not_take_are_refused(inputs):
    reference = quantplug.quantize(Averaged().eval(), inputs, "x86", [inputs], progress=False).reference
    with pytest.raises(LoweringError, match="The graph takes 3 flat inputs, the example inputs hold 1"):
        quantplug.get_quantizer("x86").backend.lower(reference, inputs[:1])
