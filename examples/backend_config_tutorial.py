"""A backend declared with torch.ao's BackendConfig, in PyTorch 2 export: the three experiments of PyTorch's tutorial.

The backend runs quantized linear layers and fused convolution-relu, in scales of at least 2**-12. What differs from
FX graph mode: nothing is ignored, every layer that stays float says why.

Run it: python examples/backend_config_tutorial.py
"""

import torch
import torch.ao.nn.intrinsic as nni
from torch import nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
    utils,  # noqa: F401 - BackendConfig needs it, and does not import it
)

import quantplug
from quantplug import AnnotationError, from_qconfig_mapping, import_backend_config


class MyModel(nn.Module):
    """Linear, convolution, perhaps a batch norm, relu and sigmoid, for [1, 3, 10, 10]."""

    def __init__(self, use_bn: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 3)
        self.conv = nn.Conv2d(3, 3, 3)
        self.bn = nn.BatchNorm2d(3) if use_bn else nn.Identity()
        self.relu = nn.ReLU()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns values in 0..1, [1, 3, 8, 1]."""
        return self.sigmoid(self.relu(self.bn(self.conv(self.linear(x)))))


# The backend, in torch.ao's words.
activation = DTypeWithConstraints(
    dtype=torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=255, scale_min_lower_bound=2**-12
)
weighted = DTypeConfig(input_dtype=activation, output_dtype=activation, weight_dtype=torch.qint8)


def declare(pattern: object) -> BackendPatternConfig:
    """Returns a config of a pattern whose output has an observer of its own."""
    observed = BackendPatternConfig(pattern).set_observation_type(
        ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
    )
    return observed.add_dtype_config(weighted)


backend_config = BackendConfig("tutorial").set_backend_pattern_configs(
    [
        declare(nn.Linear).set_root_module(nn.Linear),
        declare((nn.Conv2d, nn.ReLU)).set_fused_module(nni.ConvReLU2d),
        declare(nni.ConvReLU2d).set_root_module(nn.Conv2d),
    ]
)

# The same as a backend of ours, with a report of what became of each setter. Lowering: oneDNN kernels.
backend, imported = import_backend_config(backend_config, quantplug.X86Quantizer.backend.lowering)
print(imported)

qconfig = QConfig(MinMaxObserver.with_args(quant_min=0, quant_max=127, eps=2**-12), default_weight_observer)
fitting = QConfigMapping().set_global(None)
for kind in (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.ReLU):
    fitting.set_object_type(kind, qconfig)

x = torch.randn(1, 3, 10, 10)
experiments = {
    "1. The model that the backend was declared for": (MyModel(use_bn=False), fitting),
    "2. A batch norm, for which there is no pattern": (MyModel(use_bn=True), fitting),
    "3. The default settings, which break the constraint on scales": (
        MyModel(use_bn=False),
        get_default_qconfig_mapping("x86"),
    ),
}
for title, (model, mapping) in experiments.items():
    print(f"\n{title}\n")
    exported = torch.export.export(model.eval(), (x,)).module()
    try:
        prepared = quantplug.prepare_pt2e(exported, from_qconfig_mapping(mapping, backend))
    except AnnotationError as error:
        print(f"strict: {error}\n\nnot strict:")
        prepared = quantplug.prepare_pt2e(exported, from_qconfig_mapping(mapping, backend, strict=False))
    prepared(x)
    converted = quantplug.convert_pt2e(prepared)
    print(quantplug.explain(converted))
    program = backend.lower(converted, (x,))
    print(f"integer kernels: {[op.node for op in program.ops if op.placement == 'int8']}")
    print(f"largest difference to float: {(program(x) - model(x)).abs().max().item():.4f}")
