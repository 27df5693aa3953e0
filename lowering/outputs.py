"""Outputs as some engines take them: tensors, each once.

Before: a graph that returns anything in any structure. After: it returns its distinct tensors, flat. Front ends of
engines know no numbers, text or None among outputs, and take no tensor twice; to them a copy is the tensor itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from quantplug.core.errors import ArtefactError, shown
from quantplug.core.files.structures import structure_of, structure_text
from quantplug.core.files.typed import typed
from quantplug.core.graph.calling import return_flat
from quantplug.core.graph.operators import ALIASES, overloads_of
from quantplug.core.peers.torch_names import pytree

_COPIES = overloads_of(("clone", *ALIASES))


@dataclass(frozen=True)
class Outputs:
    """What a model returns, from what an engine computes.

    Attributes:
        structure: the containers.
        computed: for each leaf the position of the tensor among the engine's outputs; None where it is no tensor.
        fixed: the leaves that are no tensors, by their positions.
    """

    structure: pytree.TreeSpec
    computed: Sequence[int | None]
    fixed: Mapping[int, Any] = field(default_factory=dict)

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """Returns what the model returns; a tensor that it returns twice is two tensors."""
        seen: set[int] = set()
        leaves: list[Any] = []
        for place, index in enumerate(self.computed):
            if index is None:
                leaves.append(self.fixed[place])
            else:
                leaves.append(tensors[index].clone() if index in seen else tensors[index])
                seen.add(index)
        return pytree.tree_unflatten(leaves, self.structure)

    def moved(self, places: Sequence[int]) -> "Outputs":
        """Returns the outputs where the engine's have other positions.

        Args:
            places: for each of the engine's outputs before, its position now.
        """
        return replace(self, computed=[None if index is None else places[index] for index in self.computed])

    def to_json(self) -> dict[str, Any]:
        """Returns the outputs as what `json` writes.

        Raises:
            ArtefactError: a container or a fixed leaf is of a type that a file cannot name.
        """
        for value in self.fixed.values():
            if not isinstance(value, str | int | float | bool | None):
                raise ArtefactError(f"An output is {shown(value)}, which a file cannot hold; return tensors.")
        return {
            "structure": structure_text(self.structure),
            "computed": list(self.computed),
            "fixed": list(self.fixed.items()),
        }

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> "Outputs":
        """Returns the outputs that `to_json` gave.

        Raises:
            ValueError: a value is none that `to_json` gives.
        """
        found: _Written = typed(written, _Written, "the outputs")
        structure, fixed = structure_of(found.structure), dict(found.fixed)
        places = {place for place, index in enumerate(found.computed) if index is None}
        if len(found.computed) != structure.num_leaves or not places <= fixed.keys():
            raise ValueError(
                f"the outputs say of {len(found.computed)} leaves where they come from, out of "
                f"{structure.num_leaves}, and hold the fixed ones of {sorted(map(str, fixed))}"
            )
        return cls(structure, found.computed, fixed)


@dataclass(frozen=True)
class _Written:
    """Outputs as they stand in a file."""

    structure: str
    computed: tuple[int | None, ...]
    fixed: tuple[tuple[Any, ...], ...]


def make_distinct(module: fx.GraphModule) -> Outputs:
    """Lets an exported graph return each of its tensors once; the graph is changed in place."""
    leaves = pytree.tree_leaves(module.graph.output_node().args[0])
    sources = [_source(leaf) if isinstance(leaf, fx.Node) else None for leaf in leaves]
    # In the order in which they are returned first.
    returned = {source: leaf for leaf, source in reversed([*zip(leaves, sources, strict=True)]) if source is not None}
    order = [source for source in dict.fromkeys(sources) if source is not None]
    computed = [None if source is None else order.index(source) for source in sources]
    fixed = {place: leaf for place, leaf in enumerate(leaves) if sources[place] is None}
    return Outputs(return_flat(module, [returned[source] for source in order]), computed, fixed)


def _source(node: fx.Node) -> fx.Node:
    """Returns the node that computes what a node is a copy of."""
    while node.target in _COPIES:
        (node,) = node.all_input_nodes
    return node
