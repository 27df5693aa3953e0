"""The names that users call: they exist, keep torchao's signatures, and are documented."""

import inspect
import subprocess
import sys

import pytest
from torchao.quantization.pt2e import quantize_pt2e as torchao
from torchao.quantization.pt2e.quantizer import Quantizer

import quantplug

# Fixed: other tools call them.
FIXED = {
    "Artefact", "Backend", "BackendQuantizer", "QuantplugError", "Report", "X86Quantizer", "XNNPACKQuantizer",
    "backends", "calibrate", "capabilities", "convert_pt2e", "explain", "get_bias_qspec", "get_input_act_qspec",
    "get_output_act_qspec", "get_quantizer", "get_symmetric_quantization_config", "get_weight_qspec",
    "prepare_pt2e", "prepare_qat_pt2e", "quantize",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FIXED | set(quantplug.__all__)))
def test_every_public_name_exists_and_is_documented(name):
    found = getattr(quantplug, name)
    assert name in dir(quantplug)
    assert inspect.getdoc(found)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'quantplug' has no attribute 'quantise'"):
        _ = quantplug.quantise


@pytest.mark.parametrize("name", ["prepare_pt2e", "prepare_qat_pt2e", "convert_pt2e"])
def test_the_flow_has_torchaos_signatures(name):
    ours, theirs = (list(inspect.signature(getattr(m, name)).parameters.values()) for m in (quantplug, torchao))
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    for mine, other in zip(ours, theirs, strict=False):
        assert mine.kind == other.kind
        assert mine.default == other.default


def test_calibrate_and_quantize_keep_their_first_parameters():
    assert list(inspect.signature(quantplug.calibrate).parameters)[:4] == ["prepared", "loader", "limit", "progress"]
    names = list(inspect.signature(quantplug.quantize).parameters)
    assert names[:5] == ["model", "example_inputs", "backend", "calibration", "config"]
    assert inspect.signature(quantplug.quantize).parameters["backend"].default == "xnnpack"
    assert list(inspect.signature(quantplug.explain).parameters) == ["model"]
    for name in ("__call__", "save", "report", "reference", "program"):
        assert name in dir(quantplug.Artefact) or name in quantplug.Artefact.__dataclass_fields__


def test_calibrate_shows_each_option_with_its_default_and_what_it_means():
    options = list(inspect.signature(quantplug.calibrate).parameters.values())[2:]
    assert len(options) == 15
    assert all(option.default is not inspect.Parameter.empty for option in options)
    assert all(f"    {option.name}: " in inspect.getdoc(quantplug.calibrate) for option in options)


def test_q14_the_config_takes_torchaos_arguments():
    names = list(inspect.signature(quantplug.get_symmetric_quantization_config).parameters)
    assert names[:7] == [
        "is_per_channel", "is_qat", "is_dynamic", "act_qmin", "act_qmax", "weight_qmin", "weight_qmax",
    ]  # fmt: skip


def test_quantizers_are_torchaos():
    for name in ("xnnpack", "x86"):
        assert isinstance(quantplug.get_quantizer(name), Quantizer)
    for name in (
        "set_global",
        "set_module_name",
        "set_module_type",
        "set_operator_type",
        "set_object_type",
        "set_filter",
    ):
        assert callable(getattr(quantplug.XNNPACKQuantizer, name))


def test_every_error_is_one_family():
    from quantplug.core import errors

    found = [e for _, e in inspect.getmembers(errors, inspect.isclass) if e.__module__ == errors.__name__]
    assert len(found) > 5
    assert all(issubclass(e, quantplug.QuantplugError | quantplug.QuantplugWarning) for e in found)


def test_importing_the_package_imports_no_runtime():
    program = "import sys, quantplug; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0
