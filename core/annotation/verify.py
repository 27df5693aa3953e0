"""Checks annotations, of whatever quantizer, before anything is inserted for them.

Before: a graph whose nodes carry annotations. After: the same graph, unchanged; the first annotation
that cannot be carried out has raised an `AnnotationError` that names node, module path, value and remedy.
"""

import math
from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.errors import AnnotationError
from quantplug.core.graph.facts import describe, is_constant, rank, tensor_value
from quantplug.core.observers.rowwise import granularity_of
from quantplug.core.observers.scheme import PER_CHANNEL
from quantplug.core.observers.sharing import (
    Group,
    Point,
    Sharing,
    Specs,
    annotated_specs,
    concrete_specs,
    creation_order,
    describe_point,
    groups_of,
)
from quantplug.core.specs.dtypes import group_size
from quantplug.core.specs.stored_dtypes import HALF_DTYPES, STORAGE_DTYPES, dtype_range, stored_range


def verify_annotations(model: fx.GraphModule) -> Sharing:
    """Checks every annotation of a graph: keys, dtypes, ranges, axes, shared and derived references.

    Time linear in the number of annotated points.

    Returns:
        The sharing groups, which are the last thing checked.

    Raises:
        AnnotationError: an annotation cannot be carried out.
    """
    for node in model.graph.nodes:
        _check_annotation(node)
    specs = annotated_specs(model.graph)
    concrete = concrete_specs(specs)
    checked: set[int] = set()
    for point, spec in concrete.items():
        if spec is not None:
            _check_tensor(point, spec)
            if id(spec) not in checked:
                # Quantizers use one spec object for many points.
                checked.add(id(spec))
                _check_spec(point, spec)
    for point in specs:
        _check_requantization(point, specs, concrete)
    sharing = groups_of(specs, concrete)
    for group in sharing.groups:
        _check_group(group)
    creation_order(sharing)
    return sharing


def _check_annotation(node: fx.Node) -> None:
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    if annotation is None:
        return
    if not isinstance(annotation, QuantizationAnnotation):
        raise AnnotationError(
            f"{describe(node)} carries a {type(annotation).__name__} as its quantization annotation; "
            "use torchao's QuantizationAnnotation."
        )
    inputs = set(node.all_input_nodes)
    for key, spec in (annotation.input_qspec_map or {}).items():
        _check_kind(node, spec)
        if spec is not None and key not in inputs:
            raise AnnotationError(
                f"The annotation of {describe(node)} has a spec for '{key}', which is no input of it; "
                f"its inputs are {[n.name for n in node.all_input_nodes]}."
            )
    _check_kind(node, annotation.output_qspec)


def _check_kind(node: fx.Node, spec: Any) -> None:
    if spec is not None and not isinstance(spec, QuantizationSpecBase):
        raise AnnotationError(
            f"The annotation of {describe(node)} has a {type(spec).__name__} where a spec is expected; "
            "use a QuantizationSpec or one of its kin."
        )


def _check_tensor(point: Point, spec: QuantizationSpecBase) -> None:
    producer = point[0] if isinstance(point, tuple) else point
    value = producer.meta.get("val")
    if isinstance(value, (tuple, list)):
        raise AnnotationError(
            f"The {describe_point(point)} is a {type(value).__name__} of {len(value)} values and cannot have "
            "one quantization; annotate the getitem nodes that take them."
        )
    tensor = tensor_value(producer)
    if tensor is not None and not tensor.is_floating_point():
        raise AnnotationError(
            f"The {describe_point(point)} holds {tensor.dtype}, and only floating point tensors can be "
            "quantized; remove its spec."
        )
    _check_axis(point, spec)
    _check_channels_of_groups(point, spec, tensor)


def _check_channels_of_groups(point: Point, spec: QuantizationSpecBase, tensor: torch.Tensor | None) -> None:
    size = group_size(spec)
    last = tensor.shape[-1] if tensor is not None and tensor.dim() else None
    if size is None or not isinstance(last, int):
        return
    if size < 1 or last % size:
        raise AnnotationError(
            f"The {describe_point(point)} has {last} channels and is annotated with a scale for each group of {size}; "
            "choose a size that divides them."
        )


def _check_axis(point: Point, spec: QuantizationSpecBase) -> None:
    axis = getattr(spec, "ch_axis", None)
    dimensions = rank(point[0] if isinstance(point, tuple) else point)
    if getattr(spec, "qscheme", None) not in PER_CHANNEL or axis is None or dimensions is None:
        return
    if axis >= dimensions:
        raise AnnotationError(
            f"The {describe_point(point)} has {dimensions} dimensions and is annotated per channel along "
            f"axis {axis}; choose an axis below {dimensions}."
        )


def _check_spec(point: Point, spec: QuantizationSpecBase) -> None:
    if isinstance(spec, (QuantizationSpec, FixedQParamsQuantizationSpec, DerivedQuantizationSpec)):
        _check_dtype(point, spec)
        if spec.dtype in STORAGE_DTYPES:
            _check_range(point, spec)
            if isinstance(spec, FixedQParamsQuantizationSpec):
                _check_fixed(point, spec)
    if getattr(spec, "is_dynamic", False):
        _check_dynamic(point, spec)
    elif granularity_of(spec) is not None:
        raise AnnotationError(
            f"The {describe_point(point)} is annotated with a scale for each row, which only the running program can "
            "choose, and not as dynamic; give the spec is_dynamic=True."
        )


def _check_dtype(point: Point, spec: Any) -> None:
    # A float32 spec is how quantizers say "observe nothing here", usually of a bias; it has no numbers of its own.
    others = (*HALF_DTYPES, torch.float32) if isinstance(spec, QuantizationSpec) else ()
    if spec.dtype not in STORAGE_DTYPES and spec.dtype not in others:
        raise AnnotationError(
            f"The {describe_point(point)} is annotated with {spec.dtype}, for which there is no quantize "
            f"operator; choose one of {[str(d) for d in STORAGE_DTYPES]}, torch.float16 or torch.bfloat16."
        )


def _check_range(point: Point, spec: Any) -> None:
    (least, greatest), (low, high) = dtype_range(spec.dtype), stored_range(spec)
    if low < least or high > greatest or low >= high:
        raise AnnotationError(
            f"The {describe_point(point)} is annotated with the range {low}..{high} of {spec.dtype}; choose an "
            f"ascending range within {least}..{greatest}."
        )


def _check_fixed(point: Point, spec: FixedQParamsQuantizationSpec) -> None:
    low, high = stored_range(spec)
    if not (math.isfinite(spec.scale) and spec.scale > 0):
        raise AnnotationError(
            f"The {describe_point(point)} has the fixed scale {spec.scale}; a scale must be finite and positive."
        )
    if not low <= spec.zero_point <= high:
        raise AnnotationError(
            f"The {describe_point(point)} has the fixed zero point {spec.zero_point}, outside of its range "
            f"{low}..{high}; choose one inside."
        )


def _check_dynamic(point: Point, spec: Any) -> None:
    if getattr(spec, "qscheme", None) in PER_CHANNEL:
        raise AnnotationError(
            f"The {describe_point(point)} is annotated as dynamic and per channel, for which there is no "
            "choose_qparams operator; use torch.per_tensor_affine or torch.per_tensor_symmetric."
        )
    if granularity_of(spec) is not None and STORAGE_DTYPES.get(spec.dtype) != torch.int8:
        raise AnnotationError(
            f"The {describe_point(point)} is annotated with {spec.dtype} and a scale for each row; rows take "
            "torch.int8."
        )
    if STORAGE_DTYPES.get(spec.dtype, spec.dtype) not in (torch.int8, torch.uint8, *HALF_DTYPES, torch.float32):
        raise AnnotationError(
            f"The {describe_point(point)} is annotated as dynamic with {spec.dtype}; dynamic quantization takes "
            "torch.int8 or torch.uint8."
        )


def _check_requantization(point: Point, specs: Specs, concrete: Specs) -> None:
    """Numbers shared with another tensor are those of this tensor too, which another dtype on it contradicts.

    To be in one scale with another input of the same operator asks nothing of the tensor: it is requantized on its way.
    """
    spec = specs[point]
    if not isinstance(point, tuple) or not isinstance(spec, SharedQuantizationSpec) or _of_same_reader(point, spec):
        return
    wanted, found = concrete[point], concrete.get(point[0])
    if wanted is None or found is None or is_constant(point[0]):
        return
    if getattr(wanted, "dtype", None) != getattr(found, "dtype", None):
        raise AnnotationError(
            f"The {describe_point(point)} shares the quantization of another tensor in "
            f"{getattr(wanted, 'dtype', None)}, but its producer is quantized to "
            f"{getattr(found, 'dtype', None)}; give both the same dtype or the input a spec of its own."
        )


def _of_same_reader(point: tuple[fx.Node, fx.Node], spec: SharedQuantizationSpec) -> bool:
    shared = spec.edge_or_node
    return isinstance(shared, tuple) and shared[1] is point[1]


def _check_group(group: Group) -> None:
    """One observer serves every tensor of a group: not with a scale for each channel of one of them only.

    With scales of run time each tensor gets its own, as in torchao, whose x86 quantizer asks for that.
    """
    producers = {point[0] if isinstance(point, tuple) else point: point for point in reversed(group.members)}
    (_, first), *others = reversed(producers.items())
    if not others:
        return
    spec = group.spec
    found = [(_channels(producer, spec), point) for producer, point in reversed(producers.items())]
    strange = next(((size, point) for size, point in found if size != found[0][0]), None)
    if strange is not None and group_size(spec) is not None:
        raise AnnotationError(
            f"The {describe_point(strange[1])} shares its quantization with the {describe_point(first)}, whose scales "
            f"are those of groups of {group_size(spec)} channels in another shape; give it a spec of its own."
        )
    if strange is not None:
        raise AnnotationError(
            f"The {describe_point(strange[1])} shares its quantization with the {describe_point(first)}, which has a "
            f"scale for each of {found[0][0]} channels along axis {getattr(spec, 'ch_axis', None)}, and has "
            f"{strange[0]} there; give it a spec of its own, or both one scale for the tensor."
        )


def _channels(producer: fx.Node, spec: Any) -> Any:
    """Returns the size along the axis of channels, None where there is one scale or the size is not known.

    Groups of channels have a scale each in every row, so that their number is that of the whole shape.
    """
    axis, tensor = getattr(spec, "ch_axis", None), tensor_value(producer)
    if group_size(spec) is not None and tensor is not None:
        return tensor.shape
    if getattr(spec, "qscheme", None) not in PER_CHANNEL or axis is None or tensor is None:
        return None
    return tensor.shape[axis]
