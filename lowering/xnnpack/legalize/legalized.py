"""What legalization found out about the operators of a graph."""

from dataclasses import dataclass, field


@dataclass
class Legalized:
    """What legalization found out about the operators of a graph, by their names.

    Attributes:
        floats: operators that must run in float although their neighbours are quantized, and why.
        weight_only: linear operators with integer weights and float activations.
        portable: operators that must stay outside the delegates, and why.
        notes: what is to be said of operators on integer kernels.
    """

    floats: dict[str, str] = field(default_factory=dict)
    weight_only: set[str] = field(default_factory=set)
    portable: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
