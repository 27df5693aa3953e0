"""The engine that carries annotators out: match, check, decide, then write.

Before: an exported graph, annotators in the order of their declaration, and a choice of config per node.
After: the same graph with a `QuantizationAnnotation` on every node that a rule took and a `Decision` on
every compute node. Annotators are pure: only `annotate` writes to the graph, and only after every
decision has been made, so an error leaves the graph as it was.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.annotation.annotator import Annotations, Annotator, Choice, Filter
from quantplug.core.annotation.positions import angles, positions
from quantplug.core.annotation.worth import better_float, small_ends
from quantplug.core.errors import AnnotationError
from quantplug.core.graph.aliases import changed_under_other_names
from quantplug.core.graph.constants import constant_nodes
from quantplug.core.graph.facts import describe, is_constant, require_graph_module, tensor_value
from quantplug.core.graph.meta import CLAIM, IO_DTYPES, LIMITS, VIOLATIONS
from quantplug.core.graph.multiplications import shares
from quantplug.core.patterns.language import Match
from quantplug.core.patterns.matching import Findings, Found, NearMiss, PatternIndex
from quantplug.core.peers.torchao_names import mark
from quantplug.core.qdq.integer_io import IODTypes
from quantplug.core.specs.decision import Decision, record
from quantplug.core.specs.dtypes import DTypeConfig, integer_range, smallest_scale
from quantplug.core.specs.limits import (
    Limits,
    Selection,
    Violation,
    asked_ports,
    select_dtypes,
    shared_violation,
)
from quantplug.core.specs.scaling import finds_range
from quantplug.core.specs.written import spec_value


def annotate_with(
    model: fx.GraphModule,
    annotators: Iterable[Annotator],
    config: QuantizationConfig,
    filter_fn: Filter | None = None,
) -> list[list[fx.Node]]:
    """Annotates a graph with some annotators, inside anybody's Quantizer.

    Args:
        model: an exported graph; what is annotated already stays as it is.
        annotators: the largest matched piece wins, then their order.
        config: what to quantize to.
        filter_fn: the nodes that may be quantized; all of them by default.

    Returns:
        The pieces that were annotated, each with its last node first.

    Raises:
        ModelError: the model is no exported graph module.
        AnnotationError: an annotator decided about a node outside of its piece; the graph is unchanged.
    """
    rows = tuple(annotators)
    owner = ", ".join(row.name for row in rows)
    choice, outside = Choice(config, f"annotator '{owner}'", 1), Choice(None, "the filter", 1)
    graph = require_graph_module(model, "annotate_with")
    found = annotate(graph, rows, lambda node: choice if not filter_fn or filter_fn(node) else outside, owner)
    return [list(piece.match.nodes) for piece in found]


def annotate(
    model: fx.GraphModule,
    annotators: tuple[Annotator, ...],
    choose: Callable[[fx.Node], Choice],
    owner: str,
    *,
    strict: bool = True,
    without: Mapping[str, str] = MappingProxyType({}),
) -> list[Found[Annotator]]:
    """Annotates a graph: match, check, decide, then write.

    Args:
        model: an exported graph; its nodes get annotations and decisions.
        annotators: tried largest matched piece first, then in this order.
        choose: the config of a node.
        owner: the backend's name, for the report.
        strict: whether a spec that breaks a limit of the kernels is an error; if not, the operator stays
            float and the report says why.
        without: why the backend has no rule for an operator, by its name in ATen, for the report.

    Returns:
        The pieces that were annotated, in graph order.

    Raises:
        AnnotationError: an annotator decided about a node outside of its piece, or, if strict, a config
            breaks a limit; the graph is unchanged.
    """
    ends = IO_DTYPES.get(model, IODTypes())
    work = _Decisions(model.graph, owner, choose, changed_under_other_names(model.graph), ends)
    index = PatternIndex(((a, label, pattern) for a in annotators for label, pattern in a.patterns), without)
    findings = index.find(model.graph, work.accept)
    carried_out = [found for found in findings.found if work.carry_out(found)]
    for found in better_float(carried_out, work.is_quantized, work.reads):
        work.leave_float(found, "only float operators read its result")
    for found in reversed(carried_out):
        work.release_output(found)
    for found, share in small_ends(carried_out, work.share, work.stands_alone):
        where = "at an end of the model, alone between float operators"
        work.leave_float(found, f"it stands {where}, and does {100 * share:.1g} % of its multiplications")
    carried_out = [found for found in carried_out if found.match.root in work.annotations]
    work.inherit_fixed()
    decisions = list(_decisions(findings, work, owner))
    violations = work.unresolved_violations()
    if strict and violations:
        more = f" ({len(violations) - 1} more like it.)" if len(violations) > 1 else ""
        raise AnnotationError(f"{violations[0]}{more}")
    # From here on nothing can fail.
    for node, annotation in work.annotations.items():
        node.meta[Q_ANNOTATION_KEY] = annotation
    for node, decided in decisions:
        record(node, decided)
    for found in carried_out:
        work.leave_limits(found, strict)
    if violations:
        VIOLATIONS.put(model, (*VIOLATIONS.get(model, ()), *violations))
    return carried_out


@dataclass
class _Decisions:
    graph: fx.Graph
    owner: str
    choose: Callable[[fx.Node], Choice]
    changed: Mapping[fx.Node, fx.Node]
    ends: IODTypes
    annotations: Annotations = field(default_factory=dict)
    rejected: dict[fx.Node, NearMiss] = field(default_factory=dict)
    chosen: dict[fx.Node, Choice] = field(default_factory=dict)
    decided: dict[Found[Annotator], Annotations] = field(default_factory=dict)
    selected: dict[Found[Annotator], Selection] = field(default_factory=dict)
    violations: dict[fx.Node, Violation] = field(default_factory=dict)
    taken_by: dict[fx.Node, DTypeConfig] = field(default_factory=dict)

    @cached_property
    def constants(self) -> set[fx.Node]:
        """The nodes whose values do not depend on the inputs: weights, as parameters or computed from them."""
        return constant_nodes(self.graph)

    def accept(self, found: Found[Annotator]) -> str | None:
        """Returns the first reason against a match, or None."""
        taken = next((n for n in found.match.nodes if Q_ANNOTATION_KEY in n.meta), None)
        if taken is not None:
            return f"{describe(taken)} {CLAIM.get(taken, 'is already annotated by another quantizer')}"
        choice = self._choice(found.match["op"])
        if choice.config is None:
            return stays_float(choice)
        config = choice.config
        checks: Iterator[str | None] = (check(found.match, config) for check in found.owner.constraints)
        return (
            self._disagreement(found.match, choice)
            or self._mutation(found.match)
            or (None if choice.is_named else self._position(found))
            or next(filter(None, checks), None)
            or self._select_dtypes(found, config)
        )

    def _select_dtypes(self, found: Found[Annotator], config: QuantizationConfig) -> str | None:
        """Chooses the first dtype config of the rule that its specs fit; returns why none does, or None."""
        if not found.owner.dtypes:
            return None
        asked = asked_ports(self._decide(found, config), self.constants.__contains__, lambda spec: spec)
        selection = select_dtypes(found.owner.dtypes, found.match["op"], asked, self.owner)
        self.selected[found] = selection
        return self._refusal(found, selection.violation) or selection.reason or None

    def _decide(self, found: Found[Annotator], config: QuantizationConfig) -> Annotations:
        """Returns what a rule decides about a match; it is asked once."""
        if found not in self.decided:
            self.decided[found] = found.owner.decide(found.match, config)
        return self.decided[found]

    def _refusal(self, found: Found[Annotator], violation: Violation | None) -> str | None:
        if violation is None:
            return None
        self.violations.setdefault(found.match["op"], violation)
        return str(violation)

    def _shared_refusal(self, found: Found[Annotator], decided: Annotations) -> str | None:
        """Returns which limit the numbers break that the piece shares with others, or None."""
        dtypes = self.dtypes_of(found)
        if dtypes is None:
            return None
        resolved = asked_ports(decided, self.constants.__contains__, lambda spec: self._resolve(spec, decided))
        return self._refusal(found, shared_violation(found.match["op"], self.owner, dtypes, resolved))

    def dtypes_of(self, found: Found[Annotator]) -> DTypeConfig | None:
        """Returns the dtype config that was chosen for a piece, or None if its rule declares none."""
        return self.selection_of(found).chosen

    def selection_of(self, found: Found[Annotator]) -> Selection:
        """Returns which dtype config was chosen for a piece, and which were passed over."""
        return self.selected.get(found, Selection())

    def unresolved_violations(self) -> list[Violation]:
        """Returns what kept operators float that no other rule took."""
        return [violation for node, violation in self.violations.items() if node not in self.annotations]

    def leave_limits(self, found: Found[Annotator], strict: bool) -> None:
        """Leaves on the annotated nodes of a piece what its calibrated numbers have to keep."""
        dtypes, rescale = self.dtypes_of(found), found.owner.rescale
        if dtypes is None and rescale is None:
            return
        for node in found.match.nodes:
            own = rescale if node is found.match["op"] else None
            LIMITS.put(node, Limits(self.owner, dtypes, own, strict))

    def _choice(self, node: fx.Node) -> Choice:
        if node not in self.chosen:
            self.chosen[node] = self.choose(node)
        return self.chosen[node]

    def _disagreement(self, match: Match, choice: Choice) -> str | None:
        """All nodes of a piece share one config; a scope less specific than the operator's gives way."""
        for node in match.nodes:
            other = self._choice(node)
            if other.precedence and other.precedence >= choice.precedence and not _same(other.config, choice.config):
                return (
                    f"{describe(match['op'])} has its config by {choice.scope}, "
                    f"{describe(node)} another by {other.scope}"
                )
        return None

    def _mutation(self, match: Match) -> str | None:
        """A quantize/dequantize pair is a copy: it would hide a change in place from a later reader."""
        for node in match.nodes:
            for touched in (node, *node.all_input_nodes):
                if touched in self.changed:
                    return (
                        f"{describe(self.changed[touched])} changes the tensor of {describe(touched)} in place, "
                        "which is read afterwards"
                    )
        return None

    def _position(self, found: Found[Annotator]) -> str | None:
        """Positions and angles stay float, unless layers with weights take them for ordinary inputs or outputs."""
        match, is_weighted = found.match, "w" in found.match or found.owner.output == "float"
        reads = next((n for node in match.nodes for n in node.all_input_nodes if n in self._positions), None)
        turns = next((node for node in match.nodes if node in self._angles), None)
        if turns is not None and (not is_weighted or reads is not None):
            return f"{describe(turns)} is an angle of sin or cos, which 8 bits do not hold"
        if reads is not None and not is_weighted:
            return f"operand {describe(reads)} counts positions, which 8 bits do not hold"
        return None

    @cached_property
    def _positions(self) -> set[fx.Node]:
        return positions(self.graph)

    @cached_property
    def _angles(self) -> set[fx.Node]:
        return angles(self.graph)

    def carry_out(self, found: Found[Annotator]) -> bool:
        """Merges the annotations of an accepted match; false if there is still a reason against it."""
        config = self._choice(found.match["op"]).config
        assert config is not None  # accept() refused every match without one
        reason = self._float_producer(found)
        decided = {} if reason else self._decide(found, config)
        _require_inside(found, decided)
        reason = reason or _quantizes_nothing(decided) or _not_float32(decided)
        reason = reason or self._contradiction(decided) or self._shared_refusal(found, decided)
        if reason:
            self.rejected[found.match.root] = NearMiss(found.label, reason, len(found.match.nodes))
            return False
        self._merge(found, decided)
        return True

    def _float_producer(self, found: Found[Annotator]) -> str | None:
        for name in found.owner.follows:
            producer = found.match[name]
            if not self.is_quantized(producer):
                return f"operand '{name}' comes from {describe(producer)}, which is float"
        return None

    def _contradiction(self, decided: Annotations) -> str | None:
        """Returns which operand would have the numbers of another tensor and those of its producer, or None."""
        for node, annotation in decided.items():
            for source, spec in annotation.input_qspec_map.items():
                if not isinstance(spec, SharedQuantizationSpec) or _is_input_of(node, spec.edge_or_node):
                    continue
                wanted, found = self._resolve(spec, decided), self._resolve(SharedQuantizationSpec(source), decided)
                dtypes = [getattr(one, "dtype", None) for one in (wanted, found)]
                if None not in dtypes and dtypes[0] != dtypes[1] and source not in self.constants:
                    return (
                        f"operand '{source.name}' would share numbers in {dtypes[0]}, and is quantized to {dtypes[1]}"
                    )
        return None

    def _merge(self, found: Found[Annotator], decided: Annotations) -> None:
        dtypes = self.dtypes_of(found)
        for node in found.match.nodes:
            self.annotations[node] = decided.get(node) or QuantizationAnnotation()
            mark(self.annotations[node])
            if dtypes is not None:
                self.taken_by[node] = dtypes

    def release_output(self, found: Found[Annotator]) -> None:
        """Leaves the output of a kernel that can write float in float if only float operators read it.

        Called from the last piece to the first: a move or a join that nobody reads in integers goes too.
        """
        root = found.match.root
        if root not in self.annotations or not found.owner.writes_float:
            return
        if any(self.reads(user, root) for user in root.users):
            return
        if found.owner.follows or found.owner.output == "shared":
            self.leave_float(found, "only float operators read its result")
        else:
            self.annotations[root].output_qspec = None
            self._release_summands(found)

    def _release_summands(self, found: Found[Annotator]) -> None:
        """Leaves in float what a kernel adds to a float result; products keep their integers."""
        summands = {found.match[name] for name in found.owner.adds}
        for node in set(found.match.nodes) - {found.match["op"]}:
            read = self.annotations[node].input_qspec_map
            self.annotations[node].input_qspec_map = {n: spec for n, spec in read.items() if n not in summands}

    def stands_alone(self, found: Found[Annotator]) -> bool:
        """Tells whether a piece between float operators quantizes its input, with ranges that calibration fixes."""
        root, operator = found.match.root, found.match["op"]
        choice = self._choice(operator)
        spec = choice.config.input_activation if choice.config else None
        if root not in self.annotations or choice.is_named or spec is None or spec.is_dynamic:
            return False
        beside = (root, *operator.all_input_nodes)
        return not any(self.is_quantized(node) or self._is_given(node) for node in beside if node not in self.constants)

    def _is_given(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and self.ends.input is not None

    def share(self, node: fx.Node) -> float:
        """Returns which share of the model's multiplications a node does; 1 where they are not known."""
        return self._shares.get(node, 1.0)

    @cached_property
    def _shares(self) -> dict[fx.Node, float]:
        return shares(self.graph)

    def leave_float(self, found: Found[Annotator], reason: str) -> None:
        """Takes back the annotations of a piece."""
        for node in found.match.nodes:
            self.annotations.pop(node, None)
        self.rejected[found.match.root] = NearMiss(found.label, reason, len(found.match.nodes))

    def reads(self, user: fx.Node, source: fx.Node) -> bool:
        """Tells whether a node reads another in integers; the graph's output does where integers are asked for."""
        if user.op == "output":
            return self.ends.output is not None
        annotation = self._annotation(user, {})
        return annotation is not None and source in annotation.input_qspec_map

    def is_quantized(self, node: fx.Node) -> bool:
        """Tells whether a node writes integers."""
        return self._spec_at(node, {}) is not None

    def inherit_fixed(self) -> None:
        """Lets input edges take over the fixed qparams of their producer.

        Without it the tensor would be quantized twice, once fixed and once observed, and every such edge
        would cost a requantization in the kernel graph. An edge that other inputs share keeps its own
        spec: the fixed range of one input need not hold for the others.
        """
        for node, annotation in self.annotations.items():
            shared = _shared_inputs(node, annotation.input_qspec_map)
            for source, spec in annotation.input_qspec_map.items():
                fixed = self._resolve(SharedQuantizationSpec(source), {})
                if (
                    isinstance(spec, QuantizationSpec)
                    and isinstance(fixed, FixedQParamsQuantizationSpec)
                    and not spec.is_dynamic
                    and fixed.dtype == spec.dtype
                    and integer_range(fixed) == integer_range(spec)
                    and _can_be_fixed(spec, fixed)
                    and source not in shared
                    and not self._refuses_fixed(node, fixed)
                ):
                    annotation.input_qspec_map[source] = SharedQuantizationSpec(source)

    def _refuses_fixed(self, node: fx.Node, fixed: QuantizationSpecBase) -> bool:
        dtypes = self.taken_by.get(node)
        return dtypes is not None and bool(dtypes.refuses([("input", fixed)]))

    def _resolve(self, spec: QuantizationSpecBase | None, decided: Annotations) -> QuantizationSpecBase | None:
        """Returns what a spec comes to when the points that it shares with are followed."""
        seen: set[object] = set()
        while isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node not in seen:
            seen.add(spec.edge_or_node)
            spec = self._spec_at(spec.edge_or_node, decided)
        return None if isinstance(spec, SharedQuantizationSpec) else spec

    def _spec_at(self, place: object, decided: Annotations) -> QuantizationSpecBase | None:
        if isinstance(place, fx.Node):
            annotation = self._annotation(place, decided)
            return annotation.output_qspec if annotation is not None else None
        assert isinstance(place, tuple)
        source, user = place
        annotation = self._annotation(user, decided)
        return annotation.input_qspec_map.get(source) if annotation is not None else None

    def _annotation(self, node: fx.Node, decided: Annotations) -> QuantizationAnnotation | None:
        return decided.get(node) or self.annotations.get(node) or node.meta.get(Q_ANNOTATION_KEY)


def _is_input_of(node: fx.Node, point: object) -> bool:
    return isinstance(point, tuple) and point[1] is node


def _can_be_fixed(spec: QuantizationSpec, fixed: FixedQParamsQuantizationSpec) -> bool:
    """Tells whether fixed numbers are such as a spec may come to, whose observer makes no rule for scales."""
    if not finds_range(spec) or fixed.scale < smallest_scale(spec):
        return False
    if spec.qscheme is not torch.per_tensor_symmetric:
        return spec.qscheme in (torch.per_tensor_affine, None)
    low, high = integer_range(spec)
    middles = (0,) if spec.dtype.is_signed else ((low + high) // 2, (low + high + 1) // 2)
    return fixed.zero_point in middles


def _shared_inputs(node: fx.Node, specs: Mapping[fx.Node, QuantizationSpecBase | None]) -> set[fx.Node]:
    edges = (spec.edge_or_node for spec in specs.values() if isinstance(spec, SharedQuantizationSpec))
    return {edge[0] for edge in edges if isinstance(edge, tuple) and edge[1] is node}


def _same(one: QuantizationConfig | None, other: QuantizationConfig | None) -> bool:
    """Whether two configs ask for the same; torchao's equality compares observer constructors by identity."""
    if one is None or other is None:
        return one is other
    return all(map(_same_spec, vars(one).values(), vars(other).values()))


def _same_spec(one: object, other: object) -> bool:
    if not isinstance(one, QuantizationSpec) or not isinstance(other, QuantizationSpec):
        return bool(one == other)
    try:
        return bool(one == other) or spec_value(one, str) == spec_value(other, str)
    except AnnotationError:  # an observer constructor without a name, such as a lambda
        return False


def _require_inside(found: Found[Annotator], decided: Annotations) -> None:
    outside = next((node for node in decided if node not in found.match.nodes), None)
    if outside is not None:
        raise AnnotationError(
            f"Rule '{found.label}' annotates {describe(outside)}, which is not part of the piece that it matched; "
            "let it return annotations of matched nodes only."
        )


def _quantizes_nothing(annotations: Annotations) -> str | None:
    """A rule that only fuses claims its piece, so that no other quantizes inside of it, and leaves it float."""
    specs = (spec for found in annotations.values() for spec in (*found.input_qspec_map.values(), found.output_qspec))
    return None if any(spec is not None for spec in specs) else "the rule keeps the piece together in float"


def _not_float32(annotations: Annotations) -> str | None:
    for node, annotation in annotations.items():
        for source in annotation.input_qspec_map:
            found = tensor_value(source)
            if found is not None and found.dtype != torch.float32:
                kind = "constant" if is_constant(source) else "operand"
                return f"{kind} {describe(source)} of '{node.name}' is {found.dtype}, not torch.float32"
    return None


def stays_float(choice: Choice) -> str:
    """Returns in words why a choice without config leaves a node float."""
    return f"set to float by {choice.scope}" if choice.precedence else "no config scope covers it"


def _decisions(findings: Findings[Annotator], work: _Decisions, owner: str) -> Iterator[tuple[fx.Node, Decision]]:
    for found in findings.found:
        scope = work._choice(found.match["op"]).scope
        refused = work.rejected.get(found.match.root)
        for node in found.match.nodes:
            if refused is None:
                selection = work.selection_of(found)
                yield (
                    node,
                    Decision(
                        owner,
                        rule=found.label,
                        root=found.match.root.name,
                        config=scope,
                        dtypes=selection.chosen.name if selection.chosen else "",
                        passed_over="; ".join(selection.passed_over),
                    ),
                )
            else:
                near = max(refused, findings.also.get(node, refused), key=lambda miss: miss.matched)
                yield node, Decision(owner, root=node.name, config=scope, nearest=near.label, reason=near.reason)
    for node, miss in findings.misses.items():
        choice = work._choice(node)
        if choice.config is None:
            yield node, Decision(owner, root=node.name, config=choice.scope, reason=stays_float(choice))
        else:
            yield node, Decision(owner, root=node.name, config=choice.scope, nearest=miss.label, reason=miss.reason)
