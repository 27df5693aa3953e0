"""Several quantizers as one: each annotates its region, and precedence decides where regions overlap.

Before: an exported graph, and quantizers of ours, torchao's, ExecuTorch's or anybody's. After: one annotated
graph on which each node's decision names the quantizer that took it. It works in torchao's own prepare, too.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import fx
from torchao.quantization.pt2e.quantizer import ComposableQuantizer as TorchaoComposableQuantizer
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.core.batch_norms.inference import Permission
from quantplug.core.errors import ConfigError
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.graph.meta import SUBMODEL, UNMATCHED
from quantplug.quantizers.composition.compose import compose
from quantplug.quantizers.composition.folding import folds_everywhere, may_fold
from quantplug.quantizers.composition.members import Member, Members
from quantplug.quantizers.composition.ownership import adjust_own, validate_own
from quantplug.quantizers.composition.precedence import erase_borders, places
from quantplug.quantizers.composition.region import Region
from quantplug.quantizers.composition.transforms import transform_in_turn

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
        self._members = Members()
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
        if isinstance(quantizer, ComposableQuantizer | TorchaoComposableQuantizer):
            raise ConfigError("A composition takes no other composition; add its quantizers one by one.")
        self._members.add(quantizer, region, precedence, name)
        return self

    @property
    def members(self) -> tuple[Member, ...]:
        """The quantizers, the greatest precedence first, under names of which each occurs once.

        Raises:
            ConfigError: there are none, or some can not be told apart.
        """
        return self._members.ranked()

    @property
    def folds_batch_norm(self) -> bool | Permission:
        """Whether prepare folds batch norms: each quantizer decides in its region, the greatest precedence first."""
        return True if folds_everywhere(self._members) else self._may_fold

    def _may_fold(self, producer: fx.Node, batch_norm: fx.Node) -> str | None:
        return may_fold(self.members, producer, batch_norm)

    @property
    def leaves_all_float(self) -> bool:
        """Whether no quantizer is asked for any quantization."""
        return all(getattr(member.quantizer, "leaves_all_float", False) for member in self._members)

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """Runs the transforms of every quantizer in its region, the greatest precedence first.

        Raises:
            ConfigError: there are no quantizers; if strict, a region covers nothing.
            ModelError: a transform returns no graph module.
        """
        unmatched = self._unmatched(model)
        model = transform_in_turn(model, self.members)
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
            validate_own(member, model)

    def prepare_obs_or_fq_callback(self, model: fx.GraphModule, edge_or_node_to_obs_or_fq: Any) -> None:
        """Lets each quantizer adjust the observers at the points that it annotated.

        Args:
            model: the graph that prepare inserts observers into.
            edge_or_node_to_obs_or_fq: for each annotated point its observer, as torchao's prepare passes it.

        Raises:
            AnnotationError: a quantizer gives an observer to a point of another's.
        """
        for member in self.members:
            adjust_own(member, model, edge_or_node_to_obs_or_fq)
