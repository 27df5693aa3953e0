"""The plan: what annotation decided about a whole model, as a plain value.

Before: an annotated or prepared graph, by whichever quantizer. After: nodes by stable names with their
specs, owner and reason, the sharing groups, the dependencies of derived specs and the transforms that were
asked for. A plan can be written as JSON, compared with another, and replayed on a re-export of the model.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer import DerivedQuantizationSpec, QuantizationAnnotation, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.annotation.stable_names import Names, operand_of, source_of
from quantplug.core.batch_norms.inference import BATCH_NORMS, Folding, Permission
from quantplug.core.errors import AnnotationError, ArtefactError, QuantplugError, first_line, shown
from quantplug.core.files.typed import typed
from quantplug.core.graph.facts import module_path, require_graph_module
from quantplug.core.graph.hidden_nodes import transform_without
from quantplug.core.graph.meta import FOLDINGS, FOLDS, LIMITS, TRANSFORMS
from quantplug.core.observers.sharing import annotated_specs, annotation_of, sharing_groups
from quantplug.core.peers.torchao_names import is_marked
from quantplug.core.specs.decision import Decision, decision, record
from quantplug.core.specs.limits import Limits
from quantplug.core.specs.written import (
    SpecValue,
    known_function,
    named_value,
    plain_value,
    remembered,
    spec_of,
    spec_value,
)

VERSION = 3


@dataclass(frozen=True)
class Transforms:
    """Graph rewrites that ran before annotation, one after the other.

    Attributes:
        functions: the rewrites, as "module:function".
        outside: the stable names of the nodes that they did not see.
    """

    functions: tuple[str, ...]
    outside: tuple[str, ...] = ()


def function_name(function: Any) -> str:
    """Returns "module:function"; what is no function of a module has a name that no replay finds."""
    module, name = getattr(function, "__module__", "?"), getattr(function, "__qualname__", repr(function))
    return str(remembered(module, name, function)["name"])


@dataclass(frozen=True)
class PlannedNode:
    """What was decided about one node.

    Attributes:
        node: its stable name.
        decided: the decision of the backend, or None if its quantizer leaves none.
        inputs: spec by operand name.
        output: spec of the output, or None.
        annotated: whether a quantizer claimed the node.
        allow_implicit_sharing: torchao's flag of the annotation.
        limits: what its kernel asks of the calibrated numbers, as a JSON value, or None.
    """

    node: str
    decided: Decision | None
    inputs: dict[str, SpecValue]
    output: SpecValue | None
    annotated: bool
    allow_implicit_sharing: bool = True
    limits: Any = None


@dataclass(frozen=True)
class Plan:
    """A whole model's annotation as a value; two plans are equal if they ask for the same quantization.

    Attributes:
        nodes: in graph order.
        groups: points of the graph that use one observer, groups of one left out; an output is named by
            its node, an input "node<-operand".
        derived: for each point with a derived spec, the points that it is derived from.
        transforms: the graph rewrites that ran before annotation; a composition's quantizers have theirs each.
        folds_batch_norm: whether batch norms were folded.
        unfolded: the batch norms that were not, although others were; a module path, and a count among the calls
            of that module.
    """

    nodes: tuple[PlannedNode, ...]
    groups: tuple[tuple[str, ...], ...]
    derived: dict[str, tuple[str, ...]]
    transforms: tuple[Transforms, ...] = ()
    folds_batch_norm: bool = True
    unfolded: tuple[str, ...] = ()

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
            read = typed(json.loads(text), dict[str, Any], "it")
            if read["version"] != VERSION:
                raise ArtefactError(
                    f"The plan has version {shown(read['version'])}, this release reads {VERSION}; make it again."
                )
            nodes = typed(read["nodes"], tuple[Any, ...], "'nodes'")
            others = {name: value for name, value in read.items() if name != "version"}
            plan: Plan = typed({**others, "nodes": tuple(map(_planned, nodes))}, Plan, "the plan")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, ArtefactError):
                raise
            raise ArtefactError(f"The text is no plan ({_reason(error)}); write one with Plan.json.") from error
        for asked in plan.transforms:
            for name in asked.functions:
                known_function(name)
        return plan

    def differences(self, other: "Plan") -> list[str]:
        """Returns in words what another plan has differently; empty if both are equal."""
        mine, theirs = ({node.node: node for node in plan.nodes} for plan in (self, other))
        found = [f"{name} is only in the first plan" for name in mine if name not in theirs]
        found += [f"{name} is only in the second plan" for name in theirs if name not in mine]
        found += [text for name in mine if name in theirs for text in _node_differences(mine[name], theirs[name])]
        for name in ("groups", "derived", "transforms", "folds_batch_norm", "unfolded"):
            if getattr(self, name) != getattr(other, name):
                found.append(f"{name} differ: {_first_difference(getattr(self, name), getattr(other, name))}")
        return found

    def quantizer(self) -> Quantizer:
        """Returns a quantizer that replays the plan on a re-export of the same model."""
        return _Replay(self)


def _planned(written: Any) -> PlannedNode:
    """Returns a node as it was written; what it says is tried here, so that a replay depends on the model alone.

    Raises:
        ArtefactError: it says what no plan says.
    """
    where = f"at node '{shown(written.get('node'))}'" if isinstance(written, dict) else "among its nodes"
    try:
        planned: PlannedNode = typed(written, PlannedNode, "it")
        for port, spec in [*planned.inputs.items(), *([("output", planned.output)] if planned.output else [])]:
            where = f"at {shown(port)} of node '{shown(planned.node)}'"
            spec_of(spec, str)
        where = f"at the limits of node '{shown(planned.node)}'"
        typed(named_value(planned.limits), Limits | None, "'limits'")
        return planned
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, QuantplugError) else f"{_reason(error)}; write it with Plan.json."
        raise ArtefactError(f"The plan cannot be read {where}: {reason}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") if isinstance(error, ValueError) else first_line(error)


def _node_differences(one: PlannedNode, other: PlannedNode) -> Iterator[str]:
    for name in ("inputs", "output", "decided", "annotated", "allow_implicit_sharing", "limits"):
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
    names = Names(graph)
    known = (n for n in names.nodes if annotation_of(n) is not None or decision(n) is not None)
    nodes = tuple(_plan_node(node, names) for node in known)
    sharing = sharing_groups(graph)
    groups = tuple(tuple(map(names.point, group.members)) for group in sharing.groups if len(group.members) > 1)
    derived = {
        names.point(point): tuple(map(names.point, spec.derived_from))
        for point, spec in annotated_specs(graph).items()
        if isinstance(spec, DerivedQuantizationSpec)
    }
    transforms = TRANSFORMS.get(model, ())
    folds = FOLDS.get(model, True)
    return Plan(nodes, groups, derived, transforms, folds, _unfolded(FOLDINGS.get(model, ())) if folds else ())


def _unfolded(foldings: Iterable[Folding]) -> tuple[str, ...]:
    found = list(foldings)
    names = _counted(folding.module_path for folding in found)
    return tuple(name for name, folding in zip(names, found, strict=True) if not folding.folded)


def _counted(paths: Iterable[str]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for path in paths:
        counts[path] = counts.get(path, -1) + 1
        yield f"{path}#{counts[path]}"


def _plan_node(node: fx.Node, names: Names) -> PlannedNode:
    annotation = annotation_of(node)
    specs = (annotation.input_qspec_map or {}) if annotation else {}
    inputs = {operand_of(source, node): spec_value(s, names.point) for source, s in specs.items() if s is not None}
    output = annotation.output_qspec if annotation else None
    decided = decision(node)
    return PlannedNode(
        node=names.name(node),
        decided=_without_node_names(decided, node, names) if decided else None,
        inputs=inputs,
        output=spec_value(output, names.point) if output is not None else None,
        annotated=annotation is not None and is_marked(annotation),
        allow_implicit_sharing=annotation.allow_implicit_sharing if annotation else True,
        limits=plain_value(LIMITS.get(node)),
    )


def _without_node_names(decided: Decision, node: fx.Node, names: Names) -> Decision:
    return replace(decided, root=names.name_of(decided.root) or names.name(node))


class _Replay(Quantizer):
    """Writes a plan's annotations onto a graph of the same model."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    @property
    def folds_batch_norm(self) -> bool | Permission:
        return _OnlyFolded(self.plan.unfolded) if self.plan.unfolded else self.plan.folds_batch_norm

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        model = transformed(model, self.plan.transforms)
        TRANSFORMS.put(model, self.plan.transforms)
        return model

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        names = Names(model.graph)
        missing = [planned.node for planned in self.plan.nodes if names.find_node(planned.node) is None]
        if missing:
            raise AnnotationError(
                f"The plan has {len(missing)} nodes that the model has not, the first '{missing[0]}'; "
                "replay it on an export of the model that it was made for."
            )
        annotations = [(names.find_node(p.node), p, _carried_out(p, names)) for p in self.plan.nodes]
        for node, planned, annotation in annotations:
            assert node is not None
            if annotation is not None:
                node.meta[Q_ANNOTATION_KEY] = annotation
            if planned.limits is not None:
                LIMITS.put(node, named_value(planned.limits))
            if planned.decided is not None:
                root = names.find_node(planned.decided.root)
                record(node, replace(planned.decided, root=root.name if root else node.name))
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Accepts the graph: the plan was checked when it was made."""


def transformed(model: fx.GraphModule, transforms: Iterable[Transforms]) -> fx.GraphModule:
    """Runs rewrites that ran before annotation on a copy of the graph that they ran on, in place.

    Raises:
        AnnotationError: one is not known, or fails.
    """
    for asked in transforms:
        names = Names(model.graph)
        outside = [node for name in asked.outside if (node := names.find_node(name)) is not None]
        model = transform_without(model, outside, partial(_one_by_one, asked.functions))
    return model


def _one_by_one(functions: Iterable[str], model: fx.GraphModule) -> fx.GraphModule:
    for name in functions:
        function = known_function(name)
        try:
            model = function(model)
        except QuantplugError:
            raise
        except Exception as error:
            raise AnnotationError(
                f"The plan's rewrite '{shown(name)}' fails on this model ({first_line(error)}); plan again."
            ) from error
    return model


class _OnlyFolded:
    """Allows to fold the batch norms that a plan folded."""

    def __init__(self, unfolded: tuple[str, ...]) -> None:
        self._unfolded = unfolded
        self._left: set[fx.Node] | None = None

    def __call__(self, producer: fx.Node, batch_norm: fx.Node) -> str | None:
        if self._left is None:  # asked for the first time: every batch norm is still there
            nodes = [node for node in batch_norm.graph.nodes if node.target in BATCH_NORMS]
            names = _counted(map(module_path, nodes))
            self._left = {node for node, name in zip(nodes, names, strict=True) if name in self._unfolded}
        return "the plan leaves it" if batch_norm in self._left else None


def _carried_out(planned: PlannedNode, names: Names) -> QuantizationAnnotation | None:
    try:
        return _annotation(planned, names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, QuantplugError):
            raise
        raise AnnotationError(
            f"The plan has no specs that can be read at node '{shown(planned.node)}' ({first_line(error)}); plan again."
        ) from error


def _annotation(planned: PlannedNode, names: Names) -> QuantizationAnnotation | None:
    if not (planned.annotated or planned.inputs or planned.output):
        return None
    node = names.find_node(planned.node)
    assert node is not None
    return QuantizationAnnotation(
        input_qspec_map={source_of(node, o): spec_of(s, names.find_point) for o, s in planned.inputs.items()},
        output_qspec=spec_of(planned.output, names.find_point) if planned.output else None,
        allow_implicit_sharing=planned.allow_implicit_sharing,
        _annotated=planned.annotated,
    )
