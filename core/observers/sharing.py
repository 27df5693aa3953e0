"""Which edges and nodes of an annotated graph use one observer.

Before: `QuantizationAnnotation`s on the nodes of a graph. After: groups of points (an output: a node; an
input: a (producer, consumer) pair), each with the one concrete spec that its observer is made from.

Points come together in two ways, and transitively: a `SharedQuantizationSpec` names another point, and
points on the same tensor share implicitly when their specs ask for the same quantization and the
consumer allows it. Both are a union-find over the points; the time is linear in the number of points.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.errors import AnnotationError
from quantplug.core.graph.facts import describe
from quantplug.core.graph.union_find import UnionFind
from quantplug.core.observers.rowwise import granularity_of
from quantplug.core.specs.scaling import constructor_key, scaling_key

Point: TypeAlias = fx.Node | tuple[fx.Node, fx.Node]
Specs: TypeAlias = dict[Point, QuantizationSpecBase | None]

_TENSOR_FIELDS = (
    "dtype",
    "is_dynamic",
    "quant_min",
    "quant_max",
    "qscheme",
    "ch_axis",
    "scale",
    "zero_point",
)


@dataclass(frozen=True)
class Group:
    """Points that use one observer.

    Attributes:
        members: the points in graph order, a node's inputs before its output.
        spec: the concrete spec of the first member that has one; None if the group stays float.
        conflict: why the members do not quite agree, in words; "" if they do.
    """

    members: tuple[Point, ...]
    spec: QuantizationSpecBase | None
    conflict: str = ""


@dataclass(frozen=True)
class Sharing:
    """Every group of an annotated graph.

    Attributes:
        groups: in the order of their first members.
        group_of: the index of each point's group.
    """

    groups: tuple[Group, ...]
    group_of: Mapping[Point, int]


def annotation_of(node: fx.Node) -> QuantizationAnnotation | None:
    """Returns a node's annotation, or None if it has none."""
    found = node.meta.get(Q_ANNOTATION_KEY)
    return found if isinstance(found, QuantizationAnnotation) else None


def annotated_specs(graph: fx.Graph) -> Specs:
    """Returns the spec of every annotated point in graph order, a node's inputs before its output.

    An input that is mapped to None is included: other points may refer to it.
    """
    specs: Specs = {}
    for node in graph.nodes:
        annotation = annotation_of(node)
        if annotation is None:
            continue
        for producer, spec in (annotation.input_qspec_map or {}).items():
            specs[producer, node] = spec
        if annotation.output_qspec is not None:
            specs[node] = annotation.output_qspec
    return specs


def describe_point(point: Point) -> str:
    """Returns how errors and reports name a point: a node's output, or one of its inputs."""
    if isinstance(point, tuple):
        return f"input '{point[0].name}' of {describe(point[1])}"
    return f"output of {describe(point)}"


def concrete_specs(specs: Specs) -> Specs:
    """Returns every point's spec, shared ones followed to their end.

    Raises:
        AnnotationError: shared specs come back to themselves or end at a point without annotation.
    """
    concrete: Specs = {}
    for start in specs:
        passed: dict[Point, None] = {}
        point = start
        while point not in concrete:
            passed[point] = None
            spec = specs[point]
            if not isinstance(spec, SharedQuantizationSpec):
                concrete[point] = spec
                break
            point = _next_point(point, spec, specs, passed)
        for earlier in passed:
            concrete[earlier] = concrete[point]
    return concrete


def _next_point(point: Point, spec: SharedQuantizationSpec, specs: Specs, passed: Mapping[Point, None]) -> Point:
    target: Point = spec.edge_or_node
    if target not in specs:
        raise AnnotationError(
            f"The {describe_point(point)} shares its quantization with the {describe_point(target)}, "
            "which has no annotation; annotate that point or share with another one."
        )
    if target in passed:
        raise AnnotationError(
            f"The {describe_point(point)} shares its quantization with the {describe_point(target)}, "
            "which shares it back, so none of them has a dtype; give one of them a QuantizationSpec."
        )
    return target


def sharing_groups(graph: fx.Graph) -> Sharing:
    """Returns the sharing groups of an annotated graph.

    Raises:
        AnnotationError: shared specs form a cycle or refer to a point without annotation.
    """
    specs = annotated_specs(graph)
    return groups_of(specs, concrete_specs(specs))


def groups_of(specs: Specs, concrete: Specs) -> Sharing:
    """Returns the sharing groups of annotated points, given their specs and where shared ones end."""
    union = UnionFind(specs)
    for point, spec in specs.items():
        if isinstance(spec, SharedQuantizationSpec):
            union.join(spec.edge_or_node, point)
    for bucket in _same_tensor(specs, concrete):
        for other in bucket[1:]:
            union.join(bucket[0], other)
    groups = tuple(_group(points, specs) for points in union.groups())
    group_of = {point: index for index, group in enumerate(groups) for point in group.members}
    return Sharing(groups, group_of)


def _same_tensor(specs: Specs, concrete: Specs) -> Iterator[list[Point]]:
    """Yields points on one tensor that ask for the same quantization and may share implicitly."""
    distinct = {id(spec): spec for spec in concrete.values() if spec is not None}
    keys = {found: tensor_key(spec) for found, spec in distinct.items()}
    buckets: dict[tuple[fx.Node, Any], list[Point]] = {}
    for point in specs:
        spec = concrete[point]
        if spec is not None:
            producer = point[0] if isinstance(point, tuple) else point
            buckets.setdefault((producer, keys[id(spec)]), []).append(point)
    for bucket in buckets.values():
        if len(bucket) > 1 and any(isinstance(p, tuple) and _allows_sharing(p[1]) for p in bucket):
            yield bucket


def _allows_sharing(consumer: fx.Node) -> bool:
    annotation = annotation_of(consumer)
    return annotation is not None and annotation.allow_implicit_sharing


def tensor_key(spec: QuantizationSpecBase) -> tuple[Any, ...]:
    """Returns what two specs on one tensor must have in common to share implicitly.

    How the range is found is no part of it: the first observer wins (torchao's rule), and the group records the
    conflict. What becomes of the range is: a scale that has to be a power of two is no other. Derived specs share
    only with the same derivation: a bias used by two layers has two scales.
    """
    key: tuple[Any, ...] = tuple(getattr(spec, name, "absent") for name in _TENSOR_FIELDS)
    key += (granularity_of(spec), scaling_key(spec))
    if isinstance(spec, DerivedQuantizationSpec):
        key += (spec.derive_qparams_fn, *spec.derived_from)
    return key


def _group(points: list[Point], specs: Specs) -> Group:
    own = [(p, specs[p]) for p in points if not isinstance(specs[p], SharedQuantizationSpec)]
    leader, spec = own[0]
    conflict = ""
    for point, other in own[1:]:
        if spec is not None and other is not None and observer_key(other) != observer_key(spec):
            conflict = (
                f"the {describe_point(point)} asks for another observer than the {describe_point(leader)}, "
                "which is the first on this tensor and is used"
            )
            break
    return Group(tuple(points), spec, conflict)


def observer_key(spec: QuantizationSpecBase) -> Any:
    """Returns what identifies the observer that a spec asks for: equal for constructors made alike."""
    return constructor_key(spec.observer_or_fake_quant_ctr) if isinstance(spec, QuantizationSpec) else None


def creation_order(sharing: Sharing) -> list[int]:
    """Returns the groups' indices so that a derived group comes after the groups it derives from.

    Kahn's topological sort (1962); groups without dependencies keep their order.

    Raises:
        AnnotationError: a derived spec refers to a point without quantization, or derivations form a cycle.
    """
    sources = {i: _sources(group, sharing) for i, group in enumerate(sharing.groups)}
    waiting = {i: len(found) for i, found in sources.items()}
    dependents: dict[int, list[int]] = {}
    for index, found in sources.items():
        for source in found:
            dependents.setdefault(source, []).append(index)
    order = [i for i, count in waiting.items() if count == 0]
    for index in order:
        for dependent in dependents.get(index, ()):
            waiting[dependent] -= 1
            if waiting[dependent] == 0:
                order.append(dependent)
    if len(order) < len(sharing.groups):
        stuck = next(i for i, count in waiting.items() if count)
        raise AnnotationError(
            f"The derived quantization of the {describe_point(sharing.groups[stuck].members[0])} depends on "
            "itself; derive it from points whose quantization is observed or fixed."
        )
    return order


def _sources(group: Group, sharing: Sharing) -> set[int]:
    if not isinstance(group.spec, DerivedQuantizationSpec):
        return set()
    found = set()
    for point in group.spec.derived_from:
        index = sharing.group_of.get(point)
        if index is None or sharing.groups[index].spec is None:
            raise AnnotationError(
                f"The quantization of the {describe_point(group.members[0])} is derived from the "
                f"{describe_point(point)}, which is not quantized; annotate that point first."
            )
        found.add(index)
    return found
