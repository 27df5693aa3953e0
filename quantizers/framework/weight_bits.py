"""Weights that a config gives fewer bits than the backend's files store.

Before: a graph that a backend annotated. After: a warning that names such weights: they lose accuracy and save nothing.
"""

import warnings

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.errors import QuantplugWarning
from quantplug.core.graph.facts import is_constant
from quantplug.core.specs.decision import decision
from quantplug.core.specs.stored_dtypes import stored_range
from quantplug.quantizers.framework.backend import Backend, WeightBits


def tell_of_wide_weights(backend: Backend, graph: fx.Graph) -> None:
    """Warns of weights that a config gives fewer bits than the backend's files store."""
    stored = backend.weight_bits
    if stored is None:
        return
    bits_of = stored if callable(stored) else lambda weight, activation: stored
    narrow = {
        node.name: bits
        for node in graph.nodes
        if (bits := _bits_beyond(node, bits_of)) and (found := decision(node)) and found.owner == backend.name
    }
    if narrow:
        names = [f"'{name}'" for name in narrow]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"Backend '{backend.name}' stores weights in {max(narrow.values())} bits: the config's fewer bits "
            f"for {shown} cost accuracy and make no file smaller; take a config of that many bits, or a backend "
            "with kernels for fewer.",
            QuantplugWarning,
            stacklevel=2,
        )


def _bits_beyond(node: fx.Node, bits_of: WeightBits) -> int | None:
    """Returns the bits in which a constant that a node reads is stored, if it is to have fewer by more than one.

    One bit less is what kernels ask for whose sums overflow.
    """
    given = node.meta.get(Q_ANNOTATION_KEY)
    specs = given.input_qspec_map if given is not None else {}
    beside = next((spec for source, spec in specs.items() if not _is_held(source)), None)
    activation = beside if isinstance(beside, QuantizationSpec) else None
    for source, spec in specs.items():
        if _is_held(source) and isinstance(spec, QuantizationSpec) and not spec.dtype.is_floating_point:
            low, high = stored_range(spec)
            bits = bits_of(spec, activation)
            if high - low < 2 ** (bits - 2):
                return bits
    return None


def _is_held(source: fx.Node) -> bool:
    """Tells whether an operand is a constant, or made of constants alone."""
    return is_constant(source) or bool(source.all_input_nodes and all(map(is_constant, source.all_input_nodes)))
