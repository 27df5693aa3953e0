"""What a backend is made of: everything that a package with a backend of its own imports.

    from quantplug.plugin import Backend, DTypeConfig, DTypeWithConstraints, linear

- **Backends**: what kernels run, as a value; variants of it; the quantizer of one; the table of what it takes.
- **Dtypes and levels**: the numbers that kernels take at each port, and how closely they keep to the q/dq graph.
- **Annotator families**: one operator family each, the rows of a backend.
- **Constraints**: `constraints.static_only` and others, for `annotator.where(...)`; `no_groups` and `whole_groups`
  are about weights in groups.
- **Families of one's own**: an annotator is patterns and a pure function from match and config to annotations.
- **Patterns**: pieces of an ATen graph, for annotators and for lowering rules.
- **Configs and qspecs**: presets, specs of activations and weights, and what a config asks for at each port.
- **Lowering**: programs, and the two lowerings that a backend can name.
- **Lowering rules**: one, the patterns of quantize and dequantize, what it reads with and what it writes with.
- **Kernel sets**: the arithmetic of kernels as rows: `kernel_rules.products` and others make the rules of one.
- **The conformance kit** as values, for backends and for quantizers that declare nothing; `pytest --quantplug-backend
  NAME` and `pytest --quantplug-quantizer package.module:factory` have it as tests.
- **Errors**: what is raised, one sentence each; and the warning of what does not fail.

Names stay, also where what they stand for moves. Of the two namespaces, `constraints` and `kernel_rules`, the
functions are public. Importing this loads no lowering; what needs one is loaded when it is first used.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators import constraints
from quantplug.annotators.activation import clamps, known_range, own_range
from quantplug.annotators.convolution import convolution, transposed_convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.embedding import embedding
from quantplug.annotators.fusion import annotate_piece, with_activations
from quantplug.annotators.groupwise import group_weight_spec, in_groups, no_groups, whole_groups
from quantplug.annotators.half import half_table, half_weights
from quantplug.annotators.linear import linear
from quantplug.annotators.matmul import matmul
from quantplug.annotators.pattern import pattern_annotator
from quantplug.annotators.pooling import pooling, resize
from quantplug.annotators.presets import (
    activation_spec,
    config_for,
    get_float16_quantization_config,
    get_symmetric_quantization_config,
    int32_bias_spec,
    per_row,
    row_spec,
    weight_spec,
)
from quantplug.annotators.qspecs import (
    derived_bias_qspec,
    fixed_qspec,
    get_bias_qspec,
    get_input_act_qspec,
    get_output_act_qspec,
    get_weight_qspec,
)
from quantplug.annotators.qspecs import on_axis as qspec_on_axis
from quantplug.annotators.residual import residual
from quantplug.annotators.shape import concatenation, movement
from quantplug.core.annotation.annotator import Annotations, Annotator, Constraint
from quantplug.core.annotation.engine import annotate_with
from quantplug.core.errors import (
    AnnotationError,
    ArtefactError,
    CalibrationError,
    ConfigError,
    ConvertError,
    LoweringError,
    ModelError,
    PatternError,
    QuantplugError,
    QuantplugWarning,
)
from quantplug.core.graph.editing import call as add_call
from quantplug.core.graph.editing import constant as add_constant
from quantplug.core.graph.editing import replace as replace_node
from quantplug.core.graph.editing import viewed as add_view
from quantplug.core.graph.facts import constant_value, operands
from quantplug.core.named import named
from quantplug.core.observers import observer
from quantplug.core.patterns.language import (
    Match,
    Miss,
    Op,
    Pattern,
    anything,
    constant,
    each,
    either,
    item,
    literal,
    op,
    optional,
    single_use,
    value,
)
from quantplug.core.patterns.rules import Rule as LoweringRule
from quantplug.core.qdq.qparams import IntegerWeight, QParams, StaticQParams, integer_weight, qparams
from quantplug.core.qdq.qparams import dequantize as dequantize_op
from quantplug.core.qdq.qparams import is_static as has_static_qparams
from quantplug.core.qdq.qparams import quantize as quantize_op
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints
from quantplug.core.specs.levels import Deviation, Level, sqnr
from quantplug.core.specs.limits import ONEDNN_PAIRS, Pairs
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.capabilities import Capability, capability_table
from quantplug.quantizers.framework.derived import derive, union
from quantplug.quantizers.framework.engines import Engine
from quantplug.quantizers.framework.quantizer import BackendQuantizer

if TYPE_CHECKING:
    from quantplug.conformance import Candidate, Verdict, verdicts
    from quantplug.lowering.emulation import EmulatedProgram, FixedPoint, KernelSet, Numerics, emulate
    from quantplug.lowering.emulation import rows as kernel_rules
    from quantplug.lowering.emulation.rows import Row as KernelRow
    from quantplug.lowering.program import LoweredOp, Program
    from quantplug.lowering.reference import ReferenceProgram
    from quantplug.lowering.reference import lower as lower_to_reference
    from quantplug.lowering.rules import lower_by_rules

__all__ = [  # noqa: RUF022 - in the groups of the docstring
    # Backends
    "Backend",
    "BackendQuantizer",
    "Capability",
    "Engine",
    "capability_table",
    "derive",
    "named",
    "union",
    # Dtypes and levels
    "DTypeConfig",
    "DTypeWithConstraints",
    "Deviation",
    "Level",
    "sqnr",
    # Annotator families
    "binary",
    "clamps",
    "concatenation",
    "convolution",
    "embedding",
    "half_table",
    "half_weights",
    "known_range",
    "linear",
    "matmul",
    "movement",
    "own_range",
    "pooling",
    "residual",
    "resize",
    "transposed_convolution",
    # Constraints
    "Constraint",
    "constraints",
    "no_groups",
    "whole_groups",
    # Families of one's own
    "Annotations",
    "Annotator",
    "annotate_piece",
    "annotate_with",
    "pattern_annotator",
    "with_activations",
    # Patterns
    "Match",
    "Miss",
    "ONEDNN_PAIRS",
    "Op",
    "Pairs",
    "Pattern",
    "anything",
    "constant",
    "each",
    "either",
    "item",
    "literal",
    "op",
    "optional",
    "single_use",
    "value",
    # Configs and qspecs
    "QuantizationConfig",
    "activation_spec",
    "config_for",
    "derived_bias_qspec",
    "fixed_qspec",
    "get_bias_qspec",
    "get_float16_quantization_config",
    "get_input_act_qspec",
    "get_output_act_qspec",
    "get_symmetric_quantization_config",
    "get_weight_qspec",
    "group_weight_spec",
    "in_groups",
    "int32_bias_spec",
    "observer",
    "per_row",
    "qspec_on_axis",
    "row_spec",
    "weight_spec",
    # Lowering
    "LoweredOp",
    "Program",
    "ReferenceProgram",
    "lower_by_rules",
    "lower_to_reference",
    # Lowering rules
    "IntegerWeight",
    "LoweringRule",
    "QParams",
    "StaticQParams",
    "add_call",
    "add_constant",
    "add_view",
    "constant_value",
    "dequantize_op",
    "has_static_qparams",
    "integer_weight",
    "operands",
    "qparams",
    "quantize_op",
    "replace_node",
    # Kernel sets
    "EmulatedProgram",
    "FixedPoint",
    "KernelRow",
    "KernelSet",
    "Numerics",
    "emulate",
    "kernel_rules",
    # The conformance kit
    "Candidate",
    "Verdict",
    "verdicts",
    # Errors
    "AnnotationError",
    "ArtefactError",
    "CalibrationError",
    "ConfigError",
    "ConvertError",
    "LoweringError",
    "ModelError",
    "PatternError",
    "QuantplugError",
    "QuantplugWarning",
]

# To declare a backend imports no lowering: these names are looked up when they are first used.
_LATER = {
    "Candidate": "quantplug.conformance:Candidate",
    "EmulatedProgram": "quantplug.lowering.emulation.emulate:EmulatedProgram",
    "FixedPoint": "quantplug.lowering.emulation.numerics:FixedPoint",
    "KernelRow": "quantplug.lowering.emulation.rows:Row",
    "KernelSet": "quantplug.lowering.emulation.emulate:KernelSet",
    "LoweredOp": "quantplug.lowering.program:LoweredOp",
    "Numerics": "quantplug.lowering.emulation.numerics:Numerics",
    "Program": "quantplug.lowering.program:Program",
    "ReferenceProgram": "quantplug.lowering.reference:ReferenceProgram",
    "Verdict": "quantplug.conformance:Verdict",
    "emulate": "quantplug.lowering.emulation.emulate:emulate",
    "kernel_rules": "quantplug.lowering.emulation.rows",
    "lower_by_rules": "quantplug.lowering.rules:lower_by_rules",
    "lower_to_reference": "quantplug.lowering.reference:lower",
    "verdicts": "quantplug.conformance:verdicts",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'quantplug.plugin' has no attribute '{name}'")
    found = globals()[name] = pkgutil.resolve_name(_LATER[name])
    return found
