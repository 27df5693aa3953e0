"""Batches side by side through a prepared graph: all of them go through a node before any goes on to the next.

So what is changed at a node, a bias or a weight, is what every later node reads. Activations that some later node reads
are in memory for all batches.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import fx

from quantplug.core.calibration.batches import BatchReader, loader_iterator, picked, sample_count
from quantplug.core.errors import CalibrationError
from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.facts import attribute, is_observer


def batches_of(
    model: fx.GraphModule,
    loader: Iterable[Any],
    samples: int,
    inputs: Callable[[Any], Any] | None,
    *,
    least: int,
    step: str,
) -> list[tuple[Any, ...]]:
    """Returns batches as the graph's positional inputs, until they hold so many samples.

    Args:
        model: the prepared graph module.
        loader: batches as for `calibrate`.
        samples: of all batches together.
        inputs: picks the model's inputs out of a batch, as for `calibrate`.
        least: how many batches there have to be.
        step: what takes them, in errors.

    Raises:
        CalibrationError: `samples` is no positive number, a batch does not fit the model, or there are too few.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise CalibrationError(f"{step} takes a number of samples from 1 on, found {samples!r}; leave it out.")
    reader, found, seen = BatchReader(model), list[tuple[Any, ...]](), 0
    for index, batch in enumerate(loader_iterator(loader)):
        named = reader.arguments(picked(batch, inputs), index)
        found.append(tuple(named.values()))
        seen += sample_count(named)
        if seen >= samples and len(found) >= least:
            break
    if len(found) < least:
        raise CalibrationError(
            f"{step} takes {least} or more batches, and the loader yielded {len(found) or 'none'} (a generator can be "
            "read only once); pass more."
        )
    return found


class BatchRun(fx.Interpreter):
    """Runs a model without its observers; what it writes into buffers is its own."""

    def __init__(self, model: fx.GraphModule, batch: tuple[Any, ...]) -> None:
        super().__init__(model)
        self.args_iter = iter(batch)
        self.own = {name: attribute(model, name).clone() for name in written_buffers(model.graph)}

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads a buffer that the model writes from the run's own copy."""
        return self.own[str(target)] if str(target) in self.own else super().get_attr(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Passes on what reaches an observer."""
        if is_observer(self.fetch_attr(str(target))):
            return args[0]
        return super().call_module(target, args, kwargs)


def node_by_node(runs: list[BatchRun], wanted: Collection[str]) -> Iterator[fx.Node]:
    """Runs all batches node by node and yields each wanted node once all have run it."""
    for node in runs[0].graph.nodes:
        for run in runs:
            run.env[node] = run.run_node(node)
        if node.name in wanted:
            yield node
        for run in runs:
            for used in run.user_to_last_uses.get(node, []):
                del run.env[used]
