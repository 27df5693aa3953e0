"""The plan: what annotation decided about a whole model, as a plain value.

Before: an annotated or prepared graph, by whichever quantizer. After: nodes by stable identity with their
specs, owner and reason, the sharing groups, the dependencies of derived specs and the transforms that were
asked for. A plan can be written as JSON, compared with another, and replayed on a re-export of the model.

A node's identity is the module it was traced in, its operator, and its count among the same two, such as
"layer1.0.conv1:aten.conv2d.default#0"; inputs are named by their operand in the schema. Neither depends
on node names, which change when a model grows.
"""

import json
import pkgutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer import DerivedQuantizationSpec, QuantizationAnnotation, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.decision import Decision, decision, record
from quantplug.core.errors import AnnotationError, ArtefactError
from quantplug.core.graph import module_path, operands, require_graph_module
from quantplug.core.observation import observer_of
from quantplug.core.sharing import Point, annotated_specs, annotation_of, sharing_groups
from quantplug.core.specs import SpecValue, spec_of, spec_value
from quantplug.core.stage import FOLDS_KEY, TRANSFORMS_KEY

VERSION = 1


@dataclass(frozen=True)
class PlannedNode:
    """What was decided about one node.

    Attributes:
        node: its stable identity.
        decided: the decision of the backend, or None if its quantizer leaves none.
        inputs: spec by operand name.
        output: spec of the output, or None.
        annotated: whether a quantizer claimed the node.
        allow_implicit_sharing: torchao's flag of the annotation.
    """

    node: str
    decided: Decision | None
    inputs: dict[str, SpecValue]
    output: SpecValue | None
    annotated: bool
    allow_implicit_sharing: bool = True


@dataclass(frozen=True)
class Plan:
    """A whole model's annotation as a value; two plans are equal if they ask for the same quantization.

    Attributes:
        nodes: in graph order.
        groups: points of the graph that use one observer, groups of one left out; an output is named by
            its node, an input "node<-operand".
        derived: for each point with a derived spec, the points that it is derived from.
        transforms: the graph rewrites that ran before annotation, as "module:function".
        folds_batch_norm: whether batch norms were folded.
    """

    nodes: tuple[PlannedNode, ...]
    groups: tuple[tuple[str, ...], ...]
    derived: dict[str, tuple[str, ...]]
    transforms: tuple[str, ...] = ()
    folds_batch_norm: bool = True

    def json(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Returns the plan that `json` wrote.

        Raises:
            ArtefactError: the text is no plan of this version.
        """
        try:
            read = json.loads(text)
            if read["version"] != VERSION:
                raise ArtefactError(
                    f"The plan has version {read['version']}, this release reads {VERSION}; make it again."
                )
            nodes = tuple(_planned(**node) for node in read["nodes"])
            groups = tuple(tuple(group) for group in read["groups"])
            derived = {point: tuple(sources) for point, sources in read["derived"].items()}
            return Plan(nodes, groups, derived, tuple(read["transforms"]), read["folds_batch_norm"])
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ArtefactError(
                f"The text is no plan ({type(error).__name__}: {error}); write one with Plan.json."
            ) from error

    def differences(self, other: "Plan") -> list[str]:
        """Returns in words what another plan has differently; empty if both are equal."""
        mine, theirs = ({node.node: node for node in plan.nodes} for plan in (self, other))
        found = [f"{name} is only in the first plan" for name in mine if name not in theirs]
        found += [f"{name} is only in the second plan" for name in theirs if name not in mine]
        found += [text for name in mine if name in theirs for text in _node_differences(mine[name], theirs[name])]
        for name in ("groups", "derived", "transforms", "folds_batch_norm"):
            if getattr(self, name) != getattr(other, name):
                found.append(f"{name} differ: {_first_difference(getattr(self, name), getattr(other, name))}")
        return found

    def quantizer(self) -> Quantizer:
        """Returns a quantizer that replays the plan on a re-export of the same model."""
        return _Replay(self)


def _planned(decided: dict[str, Any] | None, **fields: Any) -> PlannedNode:
    return PlannedNode(decided=Decision(**decided) if decided else None, **fields)


def _node_differences(one: PlannedNode, other: PlannedNode) -> Iterator[str]:
    for name in ("inputs", "output", "decided", "annotated", "allow_implicit_sharing"):
        before, after = getattr(one, name), getattr(other, name)
        if before != after:
            yield f"{one.node}: {name} is {before}, in the second plan {after}"


def _first_difference(one: Any, other: Any) -> str:
    if isinstance(one, tuple) and isinstance(other, tuple):
        only = [item for item in one if item not in other], [item for item in other if item not in one]
        return f"only in the first {only[0][:1]}, only in the second {only[1][:1]}"
    return f"{one} and {other}"


def plan_of(model: fx.GraphModule) -> Plan:
    """Returns the plan of an annotated or prepared graph; the graph is not changed.

    Args:
        model: a graph that a quantizer annotated, or that prepare returned.

    Raises:
        ModelError: it is no graph module.
        AnnotationError: a spec holds something that has no name, or refers to a point without annotation.
    """
    graph = require_graph_module(model, "plan_of").graph
    names = _Names(graph)
    nodes = tuple(_plan_node(node, names) for node in names.nodes)
    sharing = sharing_groups(graph)
    groups = tuple(tuple(map(names.point, group.members)) for group in sharing.groups if len(group.members) > 1)
    derived = {
        names.point(point): tuple(map(names.point, spec.derived_from))
        for point, spec in annotated_specs(graph).items()
        if isinstance(spec, DerivedQuantizationSpec)
    }
    transforms = tuple(model.meta.get(TRANSFORMS_KEY, ()))
    return Plan(nodes, groups, derived, transforms, bool(model.meta.get(FOLDS_KEY, True)))


class _Names:
    """Stable names of the nodes of one graph, and back."""

    def __init__(self, graph: fx.Graph) -> None:
        self._name: dict[fx.Node, str] = {}
        counts: dict[str, int] = {}
        for node in graph.nodes:
            if observer_of(node) is not None or node.op == "output":
                continue
            base = f"{module_path(node)}:{node.target}"
            counts[base] = counts.get(base, -1) + 1
            self._name[node] = f"{base}#{counts[base]}"
        self._node = {name: node for node, name in self._name.items()}
        self._identity = {node.name: name for node, name in self._name.items()}
        self.nodes = [n for n in self._name if annotation_of(n) is not None or decision(n) is not None]

    def name(self, node: fx.Node) -> str:
        return self._name[node]

    def identity(self, node_name: str) -> str | None:
        return self._identity.get(node_name)

    def point(self, point: Point) -> str:
        if isinstance(point, fx.Node):
            return self._name[point]
        source, user = point
        return f"{self._name[user]}<-{_operand_of(source, user)}"

    def find_node(self, name: str) -> fx.Node | None:
        return self._node.get(name)

    def find_point(self, text: str) -> Point:
        name, _, operand = text.partition("<-")
        node = self._node[name]
        return (_source(node, operand), node) if operand else node


def _operand_nodes(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    for name, found in operands(node).items():
        many = found if isinstance(found, list | tuple) else None
        for position, value in enumerate(many if many is not None else (found,)):
            if isinstance(value, fx.Node):
                yield (f"{name}[{position}]" if many is not None else name), _behind_observers(value)


def _behind_observers(node: fx.Node) -> fx.Node:
    while observer_of(node) is not None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _operand_of(source: fx.Node, user: fx.Node) -> str:
    return next(name for name, node in _operand_nodes(user) if node is source)


def _source(node: fx.Node, operand: str) -> fx.Node:
    found = dict(_operand_nodes(node)).get(operand)
    if found is None:
        raise AnnotationError(
            f"The plan quantizes operand '{operand}' of '{node.name}', which has none here; plan again."
        )
    return found


def _plan_node(node: fx.Node, names: _Names) -> PlannedNode:
    annotation = annotation_of(node)
    specs = (annotation.input_qspec_map or {}) if annotation else {}
    inputs = {_operand_of(source, node): spec_value(s, names.point) for source, s in specs.items() if s is not None}
    output = annotation.output_qspec if annotation else None
    decided = decision(node)
    return PlannedNode(
        node=names.name(node),
        decided=_without_node_names(decided, node, names) if decided else None,
        inputs=inputs,
        output=spec_value(output, names.point) if output is not None else None,
        annotated=bool(annotation and annotation._annotated),
        allow_implicit_sharing=annotation.allow_implicit_sharing if annotation else True,
    )


def _without_node_names(decided: Decision, node: fx.Node, names: _Names) -> Decision:
    return replace(decided, root=names.identity(decided.root) or names.name(node))


class _Replay(Quantizer):
    """Writes a plan's annotations onto a graph of the same model."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    @property
    def folds_batch_norm(self) -> bool:
        return self.plan.folds_batch_norm

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        for transform in self.plan.transforms:
            model = pkgutil.resolve_name(transform)(model)
        model.meta[TRANSFORMS_KEY] = self.plan.transforms
        return model

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        names = _Names(model.graph)
        missing = [planned.node for planned in self.plan.nodes if names.find_node(planned.node) is None]
        if missing:
            raise AnnotationError(
                f"The plan has {len(missing)} nodes that the model has not, the first '{missing[0]}'; "
                "replay it on an export of the model that it was made for."
            )
        annotations = [(names.find_node(p.node), p, _annotation(p, names)) for p in self.plan.nodes]
        for node, planned, annotation in annotations:
            assert node is not None
            if annotation is not None:
                node.meta[Q_ANNOTATION_KEY] = annotation
            if planned.decided is not None:
                root = names.find_node(planned.decided.root)
                record(node, replace(planned.decided, root=root.name if root else node.name))
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Accepts the graph: the plan was checked when it was made."""


def _annotation(planned: PlannedNode, names: _Names) -> QuantizationAnnotation | None:
    if not (planned.annotated or planned.inputs or planned.output):
        return None
    node = names.find_node(planned.node)
    assert node is not None
    return QuantizationAnnotation(
        input_qspec_map={_source(node, o): spec_of(s, names.find_point) for o, s in planned.inputs.items()},
        output_qspec=spec_of(planned.output, names.find_point) if planned.output else None,
        allow_implicit_sharing=planned.allow_implicit_sharing,
        _annotated=planned.annotated,
    )
