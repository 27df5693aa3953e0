"""How far a graph module has come: what prepare and convert leave in its `meta`."""

from torch import fx

from quantplug.core.graph.facts import is_observer

PHASE_KEY = "quantplug_stage"
FOLDINGS_KEY = "quantplug_foldings"
CONFLICTS_KEY = "quantplug_conflicts"
FOLDS_KEY = "quantplug_folds_batch_norm"
REGION_KEY = "quantplug_region"
TRANSFORMS_KEY = "quantplug_transforms"
CLAIM_KEY = "quantplug_claim"
TERRITORY_KEY = "quantplug_territory"
UNMATCHED_KEY = "quantplug_unmatched"
NOTES_KEY = "quantplug_notes"
TRAINING_KEY = "quantplug_training"
PREPARED = "prepared"
CONVERTED = "converted"


def phase_of(model: fx.GraphModule) -> str:
    """Returns "prepared", "converted" or "" for a float model.

    A model with observers is prepared, whoever prepared it (torchao leaves no mark of its own).
    """
    if any(is_observer(module) for module in model.children()):
        return PREPARED
    stage = model.meta.get(PHASE_KEY, "")
    return str(stage)


ORIGINS = "quantplug_origins"


REASON = "quantplug_reason"


def origins(node: fx.Node) -> frozenset[str]:
    """Returns the names of the q/dq graph's compute operators that a node carries out."""
    found: frozenset[str] = node.meta.get(ORIGINS, frozenset())
    return found


def absorb(kernel: fx.Node, *nodes: fx.Node) -> None:
    """Notes that a kernel now also does what other nodes did."""
    kernel.meta[ORIGINS] = origins(kernel).union(*(origins(node) for node in nodes))
