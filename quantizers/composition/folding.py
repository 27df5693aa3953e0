"""Which batch norms prepare folds under a composition: each quantizer decides in its region.

Before: members, the greatest precedence first. After: what `folds_batch_norm` of their composition says.
"""

from collections.abc import Iterable, Sequence

from torch import fx

from quantplug.core.batch_norms.inference import Permission
from quantplug.quantizers.composition.members import Member
from quantplug.quantizers.composition.region import Region


def folds_everywhere(members: Iterable[Member]) -> bool:
    """Tells whether every batch norm is folded: one member covers the whole graph, and all of them fold."""
    each = list(members)
    covered = any(member.region == Region() for member in each)
    return covered and {_declared(member) for member in each} <= {True}


def may_fold(members: Sequence[Member], producer: fx.Node, batch_norm: fx.Node) -> str | None:
    """Returns the reason against folding a batch norm into what it follows, or None.

    What a quantizer's scopes leave float is open to those after it.
    """
    inside = [member for member in members if producer in member.region]
    responsible = next((member for member in inside if not member.leaves_float(producer)), None)
    if responsible is None:
        return inside[0].leaves_float(producer) if inside else "it lies in no quantizer's region"
    declared = _declared(responsible)
    if callable(declared):
        return declared(producer, batch_norm)
    return None if declared else f"'{responsible.name}' does not fold batch norms"


def _declared(member: Member) -> bool | Permission:
    declared: bool | Permission = getattr(member.quantizer, "folds_batch_norm", True)
    return declared
