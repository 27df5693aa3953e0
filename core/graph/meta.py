"""What we note on nodes and graph modules: every key of `meta` that is ours, who writes it and what it says.

Before: `node.meta` and `GraphModule.meta`, which take any value under any key. After: typed notes; no other file
knows their keys.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from torch import Tensor, fx

if TYPE_CHECKING:  # what the rooms above note; nothing of them is known here when the program runs
    from quantplug.core.annotation.plan import Transforms
    from quantplug.core.batch_norms.inference import Folding
    from quantplug.core.qdq.integer_io import IODTypes
    from quantplug.core.specs.decision import Decision
    from quantplug.core.specs.limits import Limits, Violation

T = TypeVar("T")
Holder = fx.Node | fx.GraphModule


@dataclass(frozen=True)
class Note(Generic[T]):
    """Something that one part of the framework leaves in `meta` for another.

    Attributes:
        key: where it stands in `meta`; copies of a `meta` carry it along.
        says: what it says, and on what.
    """

    key: str
    says: str

    @overload
    def get(self, holder: Holder) -> T | None: ...
    @overload
    def get(self, holder: Holder, default: T) -> T: ...
    def get(self, holder: Holder, default: T | None = None) -> T | None:
        """Returns what is noted, or the default where nothing is."""
        found: T | None = holder.meta.get(self.key, default)
        return found

    def put(self, holder: Holder, value: T) -> None:
        """Notes a value, in place of any before."""
        holder.meta[self.key] = value

    def drop(self, holder: Holder) -> T | None:
        """Takes the note off; returns what it said, None where there was none."""
        found: T | None = holder.meta.pop(self.key, None)
        return found

    def on(self, holder: Holder) -> bool:
        """Tells whether anything is noted."""
        return self.key in holder.meta


# On nodes, of annotation.
DECISION: "Note[Decision]" = Note("quantplug_decision", "what annotation decided about an operator")
LIMITS: "Note[Limits]" = Note("quantplug_limits", "what the kernel of an annotated node asks of its calibrated numbers")
CLAIM: Note[str] = Note("quantplug_claim", "how another quantizer's node is told of, while a member annotates")
TERRITORY: Note[tuple[str, ...]] = Note("quantplug_territory", "names of the members that may change a node")
SOURCE: Note[list[tuple[str, Any]]] = Note("source_fn_stack", "torch's own key: what strict export says an operator is")

# On nodes, of graphs as they are.
LIFTED: Note[bool] = Note("quantplug_lifted", "whether a submodel's input is given the same constant at every call")
DROPOUT: Note[float] = Note("quantplug_dropout_p", "the rate that attention was exported with, while it is off")

# On nodes, of lowering.
ORIGINS: Note[frozenset[str]] = Note("quantplug_origins", "names of the q/dq graph's operators that a node carries out")
REASON: Note[str] = Note("quantplug_reason", "why the rules left an operator as it is")
HOW: Note[str] = Note("quantplug_how", "how a node computes otherwise than the q/dq graph says")
STATE: Note[bool] = Note("quantplug_state", "whether an operator carries the state of an unrolled recurrence")
PAIR: Note[int] = Note("quantplug_pair", "how large the sum of two products of an x86 kernel can get")

# On graph modules, for the quantizer.
SUBMODEL: Note[bool] = Note("quantplug_submodel", "whether it is a submodel of control flow")
TRAINING: Note[bool] = Note("quantplug_training", "whether it is annotated for training")
UNMATCHED: Note[list[str]] = Note("quantplug_unmatched", "which regions of a composition cover nothing, in words")

# On graph modules, for plans, conversion and reports.
PHASE: Note[str] = Note("quantplug_phase", "how far it has come: prepared or converted")
TRANSFORMS: "Note[tuple[Transforms, ...]]" = Note("quantplug_transforms", "the rewrites that ran before annotation")
IO_DTYPES: "Note[IODTypes]" = Note("quantplug_io_dtypes", "the dtypes that its float inputs and outputs get")
FOLDS: Note[bool] = Note("quantplug_folds_batch_norm", "whether its quantizer folds any batch norms")
FOLDINGS: "Note[tuple[Folding, ...]]" = Note("quantplug_foldings", "what became of each batch norm")
CONFLICTS: Note[tuple[str, ...]] = Note("quantplug_conflicts", "where specs that share observers do not quite agree")
VIOLATIONS: "Note[tuple[Violation, ...]]" = Note("quantplug_violations", "which limits it breaks that are not strict")
FLOATS: Note[dict[str, Tensor]] = Note("quantplug_floats", "parameters before calibrated weights and biases moved")
NOTES: Note[tuple[str, ...]] = Note("quantplug_notes", "what a composition tells of its members")


def origins(node: fx.Node) -> frozenset[str]:
    """Returns the names of the q/dq graph's compute operators that a node carries out."""
    return ORIGINS.get(node, frozenset())


def absorb(kernel: fx.Node, *nodes: fx.Node) -> None:
    """Notes that a kernel now also does what other nodes did."""
    ORIGINS.put(kernel, origins(kernel).union(*(origins(node) for node in nodes)))
