"""How far a graph module has come."""

from torch import fx

from quantplug.core.graph.facts import is_observer
from quantplug.core.graph.meta import PHASE

PREPARED = "prepared"
CONVERTED = "converted"


def phase_of(model: fx.GraphModule) -> str:
    """Returns "prepared", "converted" or "" for a float model.

    A model with observers is prepared, whoever prepared it (torchao leaves no mark of its own).
    """
    return PREPARED if any(is_observer(module) for module in model.children()) else PHASE.get(model, "")
