"""What a run keeps in a file, from which one that is killed goes on.

Before: a file that a run left which was killed, or none. After: what it had done, and a file with more. It appears
whole or not at all; to write it takes a small share of the time. Of several ranks the first has it, and all go on from
what it holds.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from quantplug.algorithms.weights import Weight
from quantplug.core.calibration.batches import digest
from quantplug.core.calibration.checkpoint import read_checkpoint, remove_checkpoint, write_checkpoint
from quantplug.core.calibration.node_by_node import Batches
from quantplug.core.calibration.processes import Alone, Exchange
from quantplug.core.files.whole import require_writable
from quantplug.core.peers.torch_names import pytree

# The file is written again after so many times what writing it took.
_PAUSE = 20


class Kept:
    """The file of a run.

    Args:
        path: of the file; None for none.
        fingerprint: gives what tells runs apart that would do otherwise.
        ranks: of the run.

    Attributes:
        name: of the file, in errors.

    Raises:
        ArtefactError: the file could not be written.
    """

    def __init__(self, path: str | Path | None, fingerprint: Callable[[], list[str]], ranks: Exchange | Alone) -> None:
        self.name = str(path)
        self._path = None if path is None or ranks.rank else Path(path)
        self._fingerprint = [] if path is None else fingerprint()
        self._ranks, self._due = ranks, 0.0
        if self._path is not None:
            require_writable(self._path)

    def content(self, *, resume: bool) -> dict[str, Any] | None:
        """Returns on all ranks what an earlier run left, None where there is nothing to go on from.

        Raises:
            ArtefactError: the file is no checkpoint.
            CalibrationError: it is of another model, data or options, or another process failed.
        """
        read = read_checkpoint(self._path, self._fingerprint) if self._path is not None and resume else None
        found: dict[str, Any] | None = self._ranks.gather(read)[0]
        return found

    def write(self, content: Callable[[], dict[str, Any]]) -> None:
        """Writes the file, if its turn has come.

        Raises:
            ArtefactError: the file cannot be written.
        """
        started = time.monotonic()
        if self._path is None or started < self._due:
            return
        write_checkpoint(self._path, {"fingerprint": self._fingerprint, **content()})
        ended = time.monotonic()
        self._due = ended + _PAUSE * (ended - started)

    def remove(self) -> None:
        """Removes the file."""
        if self._path is not None:
            remove_checkpoint(self._path)


def fingerprint(options: Any, model: fx.GraphModule, weights: list[Weight], batches: Batches) -> list[str]:
    """Returns what tells runs of an algorithm apart that would end with other numbers.

    Args:
        options: the algorithm, a dataclass with `checkpoint` and `resume`.
        model: the prepared graph module.
        weights: of it, that the algorithm is for.
        batches: the inputs.
    """
    grids = [number for weight in weights for number in (weight.grid.scale, weight.grid.zero_point)]
    data = (leaf for batch in batches for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    return [
        f"options {replace(options, checkpoint=None, resume=True)}",
        f"operators {[f'{node.name} {node.target}' for node in model.graph.nodes if node.op == 'call_function']}",
        f"numbers {digest((*model.parameters(), *model.buffers()))}",
        f"scales {digest(grids)}",
        f"batches {digest(data)}",
    ]
