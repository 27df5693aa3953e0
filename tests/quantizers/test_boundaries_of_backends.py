"""Integer inputs and outputs on every backend, in the artefact that a user gets."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.errors import ConfigError, ConvertError
from quantplug.core.qdq.integer_io import boundary_qparams, quantized_inputs

DTYPES = {"xnnpack": torch.int8, "x86": torch.uint8, "openvino": torch.uint8, "cortex_m": torch.int8, "arm": torch.int8}


def network(first):
    torch.manual_seed(0)
    layers = [first, nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 6)).eval()


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", list(DTYPES))
@pytest.mark.parametrize("ends", ["both", "input", "output"])
def test_e03_integers_go_in_and_come_out(backend, ends):
    dtype = DTYPES[backend]
    asked = {"input": dtype if ends != "output" else None, "output": dtype if ends != "input" else None}
    model, batches = network(nn.Conv2d(3, 8, 3)), [torch.randn(1, 3, 12, 12) for _ in range(4)]
    quantizer = quantplug.get_quantizer(backend).set_io(**asked)
    artefact = quantplug.quantize(model, (batches[0],), quantizer, batches, progress=False)
    written = boundary_qparams(artefact.reference)[1][0]
    for x in batches[:2]:
        given = quantized_inputs(artefact.reference, (x,))[0]
        assert given.dtype == (asked["input"] or torch.float32)
        found, expected = artefact(given), artefact.reference(given)
        assert found.dtype == expected.dtype == (asked["output"] or torch.float32)
        assert (found.double() - expected.double()).abs().max() <= (1 if written else 1e-2)  # steps, or floats
        real = found if written is None else (found.double() - written[1]) * written[0]
        assert (real - model(x)).abs().max() < 0.15 * model(x).abs().max()


@pytest.mark.parametrize("backend", ["x86", "openvino"])
def test_the_dtype_of_another_backend_is_one_sentence(backend):
    quantizer = quantplug.get_quantizer(backend).set_io(output=torch.int8)
    model, x = network(nn.Conv2d(3, 8, 3)), torch.randn(1, 3, 12, 12)
    with pytest.raises(quantplug.QuantplugError, match=r"cannot be torch.int8: it is torch.uint8") as error:
        quantplug.quantize(model, (x,), quantizer, [x], progress=False)
    assert "\n" not in str(error.value)


def test_a_model_without_float_inputs_has_none_to_change():
    torch.manual_seed(0)
    words, model = torch.randint(0, 9, (2, 5)), nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8)).eval()
    quantizer = quantplug.get_quantizer("x86").set_io(input=torch.uint8)
    with pytest.raises(ConvertError, match=r"^No input .* torch.uint8: none is float .* `set_io`"):
        quantplug.quantize(model, (words,), quantizer, [words], progress=False)


@pytest.mark.parametrize(
    ("older", "name"),
    [("fbgemm", "x86"), ("qnnpack", "xnnpack"), ("onednn", "x86"), ("FBGEMM", "x86"), ("QNNPACK", "xnnpack")],
)
def test_older_names_are_understood_with_a_word(older, name):
    with pytest.warns(UserWarning, match=f"this is backend '{name}'"):
        assert quantplug.get_quantizer(older).backend.name == name


def test_a_name_in_capitals_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no backend 'XNNPACK' \(did you mean 'xnnpack'\?\)"):
        quantplug.get_quantizer("XNNPACK")
