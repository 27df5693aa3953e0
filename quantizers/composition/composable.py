"""Several quantizers as one: each annotates its region, and precedence decides where regions overlap.

Before: an exported graph, and quantizers of ours, torchao's, ExecuTorch's or anybody's. After: one annotated
graph on which each node's decision names the quantizer that took it. It works in torchao's own prepare, too.
"""

from collections.abc import Iterable, MutableMapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx
from torchao.quantization.pt2e.quantizer import ComposableQuantizer as TorchaoComposableQuantizer
from torchao.quantization.pt2e.quantizer import Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.annotation.plan import Transforms
from quantplug.core.annotation.stable_names import Names
from quantplug.core.batch_norms.inference import Permission
from quantplug.core.errors import AnnotationError, ConfigError, QuantplugError, first_line
from quantplug.core.graph.facts import describe, require_graph_module
from quantplug.core.graph.hidden_nodes import transform_without
from quantplug.core.graph.meta import SUBMODEL, TRANSFORMS, UNMATCHED
from quantplug.core.specs.decision import decision
from quantplug.quantizers.composition.compose import compose
from quantplug.quantizers.composition.precedence import Member, draw_borders, erase_borders, places, ranked, territory
from quantplug.quantizers.composition.region import Region
from quantplug.quantizers.framework.quantizer import BackendQuantizer

Self = TypeVar("Self", bound="ComposableQuantizer")


class ComposableQuantizer(Quantizer):
    """Several quantizers as one.

        quantizer = (
            ComposableQuantizer()
            .add(x86, Region(module="head"), precedence=1)
            .add(xnnpack, precedence=0)
        )

    Where regions overlap, the quantizer with the greater precedence annotates first, and what it leaves float is
    open to the others. Without declared precedence the one that was added first wins, as in torchao.

    Transforms see their quantizer's region only; `validate` and callback see its own annotations only.

    Attributes:
        strict: whether a region that covers nothing, and a quantizer that changes another's annotation, are errors;
            if not, the report has a note.
    """

    def __init__(self, quantizers: Iterable[Quantizer] = (), *, strict: bool = True) -> None:
        """Composes quantizers over the whole graph, the first wins.

        Raises:
            ConfigError: one of them is no quantizer.
        """
        super().__init__()
        self.strict = strict
        self._members: list[Member] = []
        self._declared: bool | None = None
        for quantizer in quantizers:
            self.add(quantizer)

    def add(
        self: Self,
        quantizer: Quantizer,
        region: Region | None = None,
        *,
        precedence: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Adds a quantizer and returns the composition.

        Args:
            quantizer: anybody's, except a composition.
            region: what it may annotate; the whole graph by default.
            precedence: the greater one wins where regions overlap. Declared for every quantizer, the result does
                not depend on the order of adding; declared for none, that order decides.
            name: how errors, decisions and reports call it; by default the name of its backend or class.

        Raises:
            ConfigError: it is no quantizer, or precedence is declared for some quantizers only.
        """
        self._check(quantizer, region, precedence)
        called = quantizer.backend.name if isinstance(quantizer, BackendQuantizer) else type(quantizer).__name__
        rank = -len(self._members) if precedence is None else precedence
        self._members.append(Member(quantizer, region or Region(), rank, name or called))
        return self

    def _check(self, quantizer: Any, region: Any, precedence: int | None) -> None:
        if isinstance(quantizer, ComposableQuantizer | TorchaoComposableQuantizer):
            raise ConfigError("A composition takes no other composition; add its quantizers one by one.")
        if not isinstance(quantizer, Quantizer):
            found = quantizer.__name__ if isinstance(quantizer, type) else type(quantizer).__name__
            raise ConfigError(f"A composition takes instances of torchao's Quantizer, found {found}.")
        if not isinstance(region, Region | None):
            raise ConfigError(f"region takes a Region, found {region!r}; pass Region(module={region!r}).")
        if self._declared not in (None, precedence is not None):
            raise ConfigError("A composition declares the precedence of all of its quantizers or of none, found both.")
        self._declared = precedence is not None

    @property
    def members(self) -> tuple[Member, ...]:
        """The quantizers, the greatest precedence first, under names of which each occurs once.

        Raises:
            ConfigError: there are none, or some can not be told apart.
        """
        if not self._members:
            raise ConfigError("The composition has no quantizers; add one with add(quantizer, region).")
        return ranked(self._members)

    @property
    def folds_batch_norm(self) -> bool | Permission:
        """Whether prepare folds batch norms: each quantizer decides in its region, the greatest precedence first."""
        declared = {getattr(member.quantizer, "folds_batch_norm", True) for member in self._members}
        covered = any(member.region == Region() for member in self._members)
        return True if covered and declared <= {True} else self._may_fold

    @property
    def leaves_all_float(self) -> bool:
        """Whether no quantizer is asked for any quantization."""
        return all(getattr(member.quantizer, "leaves_all_float", False) for member in self._members)

    def _may_fold(self, producer: fx.Node, batch_norm: fx.Node) -> str | None:
        inside = [member for member in self.members if producer in member.region]
        # What a quantizer's scopes leave float is open to those after it.
        responsible = next((member for member in inside if not _left_float(member, producer)), None)
        if responsible is None:
            return _left_float(inside[0], producer) if inside else "it lies in no quantizer's region"
        declared = getattr(responsible.quantizer, "folds_batch_norm", True)
        if callable(declared):
            refusal: str | None = declared(producer, batch_norm)
            return refusal
        return None if declared else f"'{responsible.name}' does not fold batch norms"

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """Runs the transforms of every quantizer in its region, the greatest precedence first.

        Raises:
            ConfigError: there are no quantizers; if strict, a region covers nothing.
            ModelError: a transform returns no graph module.
        """
        unmatched, members, carried_out = self._unmatched(model), self.members, tuple[Transforms, ...]()
        erase_borders(model)
        draw_borders(model, members)
        for member in members:
            model, own = _transformed(model, member)
            draw_borders(model, members, member)
            carried_out += own
        TRANSFORMS.put(model, carried_out)
        UNMATCHED.put(model, unmatched)
        return model

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Lets each quantizer annotate its region; if one fails, the graph is as it was.

        Raises:
            ConfigError: there are no quantizers; if strict, a region covers nothing; quantizers of one precedence
                cover the same operator; or a quantizer's own scopes are wrong.
            AnnotationError: if strict, a quantizer changed another's annotation.
            ModelError: the model is not an exported graph.
        """
        require_graph_module(model, "ComposableQuantizer")
        known = UNMATCHED.drop(model)
        notes = self._unmatched(model) if known is None else known
        compose(model, places(model, self.members), self.strict, notes)
        erase_borders(model)
        return model

    def _unmatched(self, model: fx.GraphModule) -> list[str]:
        # The submodels of control flow come one by one; the regions were held against all of them at first.
        if SUBMODEL.get(model):
            return []
        silent = [f"Quantizer '{m.name}': {text}" for m in self.members for text in m.region.unmatched(model)]
        if silent and self.strict:
            raise ConfigError(f"{'; '.join(silent)}; correct the region or pass strict=False.")
        return [f"{text}." for text in silent]

    def validate(self, model: fx.GraphModule) -> None:
        """Lets each quantizer validate what it annotated.

        Raises:
            AnnotationError: a quantizer refuses it; the sentence says which.
        """
        for member in self.members:
            hidden = {n: n.meta.pop(Q_ANNOTATION_KEY) for n in _annotated(model.graph) if not _owns(member, n)}
            try:
                member.quantizer.validate(model)
            except QuantplugError:
                raise
            except Exception as error:
                raise AnnotationError(
                    f"Quantizer '{member.name}' refuses the graph that it annotated: {first_line(error)}."
                ) from error
            finally:
                for node, annotation in hidden.items():
                    node.meta[Q_ANNOTATION_KEY] = annotation

    def prepare_obs_or_fq_callback(self, model: fx.GraphModule, edge_or_node_to_obs_or_fq: Any) -> None:
        """Lets each quantizer adjust the observers at the points that it annotated.

        Raises:
            AnnotationError: a quantizer gives an observer to a point of another's.
        """
        for member in self.members:
            own = {point: o for point, o in edge_or_node_to_obs_or_fq.items() if _owns(member, _holder(point))}
            before = dict(own)
            member.quantizer.prepare_obs_or_fq_callback(model, own)
            _take_over(member, before, own, edge_or_node_to_obs_or_fq)


def _left_float(member: Member, node: fx.Node) -> str | None:
    return member.quantizer.leaves_float(node) if isinstance(member.quantizer, BackendQuantizer) else None


def _transformed(model: fx.GraphModule, member: Member) -> tuple[fx.GraphModule, tuple[Transforms, ...]]:
    """Runs a quantizer's transforms in its territory; returns the graph and what a plan has to replay."""
    inside = territory(model, member)
    names = Names(model.graph)
    outside = [node for node in names.nodes if node.op == "call_function" and node not in inside]
    hidden = tuple(map(names.name, outside))
    TRANSFORMS.drop(model)
    model = transform_without(model, outside, member.quantizer.transform_for_annotation)
    return model, tuple(replace(asked, outside=hidden) for asked in TRANSFORMS.get(model, ()))


def _annotated(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if Q_ANNOTATION_KEY in node.meta]


def _owns(member: Member, node: fx.Node) -> bool:
    decided = decision(node)
    return decided is not None and decided.owner == member.name


def _holder(point: Any) -> fx.Node:
    """Returns the node whose annotation names a point: the reader of an edge, or the node itself."""
    holder: fx.Node = point[1] if isinstance(point, tuple) else point
    return holder


def _take_over(
    member: Member, before: dict[Any, Any], after: dict[Any, Any], observers: MutableMapping[Any, Any]
) -> None:
    strange = next((point for point in after if point not in before and not _owns(member, _holder(point))), None)
    if strange is not None:
        raise AnnotationError(
            f"Quantizer '{member.name}' gives an observer to {describe(_holder(strange))}, which it did not annotate; "
            "let its callback change the points that it is given."
        )
    for point in before.keys() - after.keys():
        del observers[point]
    observers.update(after)
