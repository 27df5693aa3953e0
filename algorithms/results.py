"""What an algorithm did: a mapping from node names to what became of each layer, and why others are left."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

LayerResult = TypeVar("LayerResult")


@dataclass(frozen=True, eq=False)
class ByLayer(Mapping[str, LayerResult]):
    """A mapping from layers' node names.

    Attributes:
        layers: this mapping.
        left: by node name why another layer is as it was.
    """

    layers: dict[str, LayerResult] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LayerResult:
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)
