"""FX graph mode, which the BackendConfig tutorial is about: the oracle of the importer, and the tutorial's backend.

The only place, besides the tutorial's example, that imports torch.ao.quantization, which is deprecated.
"""

import operator
import warnings
from typing import Any

import torch
import torch.ao.nn.intrinsic as nni
from models import MyModel, exported
from torch import nn
from torch.ao.quantization import MinMaxObserver, QConfig, QConfigMapping, default_weight_observer
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx

import quantplug
from quantplug.quantizers.importer import from_backend_config, from_qconfig_mapping

X = torch.linspace(-2, 2, 300).reshape(1, 3, 10, 10)
OWN = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
SHARED = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
NOT_OBSERVED = ObservationType.INPUT_OUTPUT_NOT_OBSERVED

ACTIVATION = DTypeWithConstraints(
    dtype=torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=255, scale_min_lower_bound=2**-12
)
WEIGHTED = DTypeConfig(
    input_dtype=ACTIVATION, output_dtype=ACTIVATION, weight_dtype=torch.qint8, bias_dtype=torch.float
)
PLAIN = DTypeConfig(input_dtype=torch.quint8, output_dtype=torch.quint8)


def pattern(items, observation=OWN, dtypes=WEIGHTED):
    return BackendPatternConfig(items).set_observation_type(observation).add_dtype_config(dtypes)


def fuse_conv_relu(is_qat, conv, relu):
    return nni.ConvReLU2d(conv, relu)


def fusion():
    return pattern((nn.Conv2d, nn.ReLU)).set_fused_module(nni.ConvReLU2d).set_fuser_method(fuse_conv_relu)


def tutorial_backend():
    """The backend of the tutorial: quantized linear and quantized conv-relu, nothing else."""
    linear = (
        pattern(nn.Linear)
        .set_root_module(nn.Linear)
        .set_qat_module(torch.ao.nn.qat.Linear)
        .set_reference_quantized_module(torch.ao.nn.quantized.reference.Linear)
    )
    fused = (
        pattern(nni.ConvReLU2d)
        .set_root_module(nn.Conv2d)
        .set_qat_module(torch.ao.nn.intrinsic.qat.ConvReLU2d)
        .set_reference_quantized_module(torch.ao.nn.quantized.reference.Conv2d)
    )
    return backend_of(linear, fusion(), fused, name="tutorial")


def backend_of(*patterns, name="mine"):
    return BackendConfig(name).set_backend_pattern_configs(list(patterns))


def qconfig(**options):
    """Min-max observers in 0..127 with scales of at least 2**-12, as the tutorial sets them."""
    given = {"quant_min": 0, "quant_max": 127, "eps": 2**-12, **options}
    return QConfig(activation=MinMaxObserver.with_args(**given), weight=default_weight_observer)


def everywhere(chosen=None):
    return QConfigMapping().set_global(chosen or qconfig())


def tutorial_mapping():
    chosen, mapping = qconfig(), QConfigMapping()
    for kind in (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.ReLU):
        mapping.set_object_type(kind, chosen)
    return mapping


def fx_reference(model, x, mapping, backend_config):
    """Returns FX graph mode's reference model, calibrated with x."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(model.eval(), mapping, (x,), backend_config=backend_config)
        prepared(x)
        return convert_to_reference_fx(prepared, backend_config=backend_config)


def fx_steps(converted):
    """The activations' steps of FX's reference model in words, one a line."""
    return [step for node in converted.graph.nodes for step in _fx_step(converted, node)]


def _fx_step(converted, node):
    if node.target is torch.quantize_per_tensor:
        scale, zero_point = (getattr(converted, argument.target) for argument in node.args[1:3])
        yield f"quantize {float(scale):.6g} {int(zero_point)}"
    elif node.op == "call_module":
        module = converted.get_submodule(node.target)
        parts = list(module) if isinstance(module, nn.Sequential) else [module]
        yield from (type(part).__name__.lower().replace("batchnorm2d", "batch_norm") for part in parts)
    elif node.op == "call_method":
        yield node.target
    elif node.op == "call_function" and node.target is not getattr:
        yield getattr(node.target, "__name__", operator.attrgetter("name")(node))


def steps(converted):
    """The activations' steps of a q/dq graph of ours in the same words."""
    constant: set[Any] = set()
    found = []
    for node in converted.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and set(node.all_input_nodes) <= constant):
            constant.add(node)
        elif node.op == "call_function":
            found.append(_step(node))
    return found


def _step(node):
    name = str(node.target).split(".")[1]
    if name == "quantize_per_tensor":
        return f"quantize {node.args[1]:.6g} {node.args[2]}"
    return "dequantize" if name == "dequantize_per_tensor" else name.rstrip("_")


def prepared(model, x, backend_config, mapping=None, *, strict=True, observe=True):
    quantizer = from_qconfig_mapping(mapping or everywhere(), from_backend_config(backend_config), strict=strict)
    found = quantplug.prepare_pt2e(exported(model, x), quantizer)
    if observe:
        with torch.no_grad():
            found(x)
    return found


def converted(model, x, backend_config, mapping=None, **options):
    return quantplug.convert_pt2e(prepared(model, x, backend_config, mapping, **options))


def my_model(use_bn=False):
    torch.manual_seed(0)
    return MyModel(use_bn).eval()
