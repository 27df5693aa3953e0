"""Batches side by side through a prepared graph: all of them go up to a node before any goes on.

So what is changed at a node, a bias or a weight, is what every later node reads. Each batch goes alone through what is
between two such nodes; meanwhile the others wait with what later nodes read of them, in a file where it is large.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, overload

from torch import Tensor, fx

from quantplug.core.calibration.batches import BatchReader, loader_iterator, picked, sample_count
from quantplug.core.calibration.parking import BUDGET, Parked, Parking, memories
from quantplug.core.calibration.processes import in_turns, joined, telling
from quantplug.core.errors import CalibrationError
from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.editing import replace_parameter
from quantplug.core.graph.facts import attribute, is_observer, is_written
from quantplug.core.graph.meta import FLOATS
from quantplug.core.peers.glibc import freed_at_once
from quantplug.core.peers.torch_names import pytree

Batch: TypeAlias = tuple[Any, ...]
"""A model's inputs by position."""


class BatchRun(fx.Interpreter):
    """Runs a model without its observers; what it writes into buffers and inputs is its own.

    It has a buffer from the first node that reads it to the last: a language model's cache is as large as its layers'
    results are small, and each layer has its own.
    """

    def __init__(self, model: fx.GraphModule, batch: Batch) -> None:
        super().__init__(model)
        inputs = model.graph.find_nodes(op="placeholder")
        values = zip(inputs, pytree.tree_leaves(batch), strict=True)
        self.env = {node: _own(node, value) for node, value in values if node.users}
        self.own: dict[str, Tensor] = {}
        written = written_buffers(model.graph)
        buffers = (node for node in model.graph.find_nodes(op="get_attr") if str(node.target) in written)
        self._buffers = {node: str(node.target) for node in buffers if node.users}
        ends = ((node, used) for node in model.graph.nodes for used in self.user_to_last_uses.get(node, []))
        self._ends = {self._buffers[used]: node for node, used in ends if used in self._buffers}
        self._next: fx.Node = next(iter(model.graph.nodes))

    def advance(self, stop: fx.Node | None = None) -> None:
        """Runs the nodes up to one, None for all; what it reads is there, and what nobody reads any more is dropped."""
        while self._next is not stop and self._next.op != "root":
            node = self._next
            if node.op != "placeholder" and node not in self._buffers:
                self._read_buffers(node)
                self.env[node] = self.run_node(node)
            self.let_go(node)
            self._next = node.next
        self._read_buffers(self._next)

    def _read_buffers(self, node: fx.Node) -> None:
        """Reads the buffers that a node is given."""
        for buffer in node.all_input_nodes:
            if buffer in self._buffers and buffer not in self.env:
                self.env[buffer] = self.run_node(buffer)

    def let_go(self, node: fx.Node) -> None:
        """Drops what nobody reads behind a node."""
        for used in self.user_to_last_uses.get(node, []):
            self.env.pop(used, None)
            name = self._buffers.get(used)
            if name is not None and self._ends[name] is node:
                self.own.pop(name, None)

    def result(self) -> Any:
        """Runs what is left and returns what the model does."""
        self.advance()
        return self.env[next(reversed(self.graph.nodes))]

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads a buffer that the model writes from the run's own copy."""
        found, name = super().get_attr(target, args, kwargs), str(target)
        if name in self._ends and name not in self.own:
            self.own[name] = found.clone()
        return self.own.get(name, found)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Passes on what reaches an observer."""
        if is_observer(self.fetch_attr(str(target))):
            return args[0]
        return super().call_module(target, args, kwargs)


class FloatRun(BatchRun):
    """Runs a prepared model as it was before algorithms moved its weights and biases."""

    def __init__(self, model: fx.GraphModule, batch: Batch) -> None:
        super().__init__(model, batch)
        self._floats = FLOATS.get(model, {})

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads a parameter that was moved as it was."""
        found = self._floats.get(str(target))
        return super().get_attr(target, args, kwargs) if found is None else found


def move_parameter(model: fx.GraphModule, names: Sequence[str], value: Tensor) -> None:
    """Gives a parameter of a prepared model another value under all its names; runs in float keep what it was.

    Args:
        model: the prepared model.
        names: of the parameter.
        value: what takes its place.
    """
    FLOATS.put(model, {**dict.fromkeys(names, attribute(model, names[0])), **FLOATS.get(model, {})})
    replace_parameter(model, names, value)


def _own(node: fx.Node, value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and is_written(node) else value


class SideBySide:
    """Runs of batches, of which one at a time has its values in memory.

    Args:
        runs: of one model, none of which has begun.
        parking: where the others wait.
    """

    def __init__(self, runs: Iterable[BatchRun], parking: Parking) -> None:
        self._parking, self._held = parking, set[int]()
        self._stop: fx.Node | None = None
        self._is_there = False
        self._runs = [(run, self._left(run)) for run in runs]

    def stops(self, wanted: Collection[fx.Node]) -> Iterator[fx.Node]:
        """Yields wanted nodes in graph order; visits until the next one find the runs in front of it."""
        for node in sorted(wanted):
            self._stop, self._is_there = node, False
            yield node
        self._stop, self._is_there = None, False

    def behind(self, wanted: Collection[fx.Node]) -> Iterator[fx.Node]:
        """Yields wanted nodes in graph order; visits until the next one find the runs behind it."""
        found = {node.next: node for node in wanted}
        for stop in self.stops(found):
            yield found[stop]

    def visits(self) -> Iterator[BatchRun]:
        """Yields each run with its values in memory, in front of the node that was yielded last, or at its end."""
        for place, (run, parked) in enumerate(self._runs):
            env, run.own = parked.taken()
            run.env = env | run.env
            try:
                run.advance(self._stop)
                yield run
            finally:
                self._runs[place] = (run, self._left(run))
        self._is_there = True

    def replace(self, node: fx.Node, value: Tensor) -> None:
        """Gives all runs another value of a node that the one reads in front of which they are."""
        if not self._is_there:
            deque(self.visits(), maxlen=0)
        self._held |= memories([value])
        for run, _ in self._runs:
            run.env[node] = value

    def _left(self, run: BatchRun) -> Parked:
        if not self._held:
            constants = (attribute(run.module, str(node.target)) for node in run.graph.find_nodes(op="get_attr"))
            self._held = memories(each for each in constants if isinstance(each, Tensor)) | {0}
        parked = self._parking.parked((run.env, run.own), self._held)
        run.env, run.own = {}, {}
        return parked


class Batches(Sequence[Batch]):
    """Batches that wait while nobody reads them."""

    def __init__(self, parking: Parking, parked: Sequence[Parked]) -> None:
        self._parking, self._parked = parking, parked

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> "Batches": ...

    def __getitem__(self, index: int | slice) -> "Batch | Batches":
        if isinstance(index, slice):
            return Batches(self._parking, self._parked[index])
        found: Batch = self._parked[index].values()
        return found

    def __len__(self) -> int:
        return len(self._parked)

    def parked(self, values: Any) -> Parked:
        """Lets other values wait beside them."""
        return self._parking.parked(values)

    def halves(self) -> "tuple[Batches, Batches]":
        """Returns the first half, and the rest: what one half says, the other may confirm.

        Halves, and not every other batch: pieces of a text are alike if they follow each other, so that every other one
        confirms whatever its neighbours say.
        """
        middle = (len(self) + 1) // 2
        return self[:middle], self[middle:]

    def runs(self, start: Callable[[Batch], BatchRun]) -> SideBySide:
        """Returns runs of all of them, each of which `start` makes of its batch."""
        return SideBySide(map(start, self), self._parking)


@contextmanager
def batches_of(
    model: fx.GraphModule,
    loader: Iterable[Any],
    samples: int,
    inputs: Callable[[Any], Any] | None,
    *,
    least: int,
    step: str,
) -> Iterator[Batches]:
    """Yields batches as the graph's positional inputs, until they hold so many samples.

    In a job of several processes each reads its own shard, and all have the batches of all: the first of each process,
    then the second of each, as one process has them that reads them in this order.

    Args:
        model: the prepared graph module.
        loader: batches as for `calibrate`.
        samples: of all batches together.
        inputs: picks the model's inputs out of a batch, as for `calibrate`.
        least: how many batches there have to be.
        step: what takes them, in errors.

    Raises:
        CalibrationError: `samples` is no positive number, a batch does not fit the model, there are too few, or another
            process failed.
    """
    with _returning_memory(model), Parking() as parking:
        found, seen = list[Parked](), 0
        with joined() as ranks, telling(ranks):
            if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
                raise CalibrationError(f"{step} takes a number of samples from 1 on, found {samples!r}; leave it out.")
            for batch, count in in_turns(ranks, _read(model, loader, inputs, alone=ranks.size == 1)):
                found.append(parking.parked(batch))
                seen += count
                if seen >= samples and len(found) >= least:
                    break
        if len(found) < least:
            raise CalibrationError(
                f"{step} takes {least} or more batches, and the loader yielded {len(found) or 'none'} (a generator can "
                "be read only once); pass more."
            )
        yield Batches(parking, found)


def _returning_memory(model: fx.GraphModule) -> AbstractContextManager[None]:
    """Lets freed tensors go back to the system beside a large model; beside a small one it is not worth the time."""
    return freed_at_once() if sum(each.nbytes for each in model.parameters()) > BUDGET else nullcontext()


def _read(
    model: fx.GraphModule, loader: Iterable[Any], inputs: Callable[[Any], Any] | None, *, alone: bool
) -> Iterator[tuple[Batch, int]]:
    """Yields batches, each with how many samples it holds."""
    reader = BatchReader(model)
    for index, batch in enumerate(loader_iterator(loader)):
        named = reader.arguments(picked(batch, inputs), index)
        found = tuple(named.values())
        # A view of all data would be sent with all of it.
        yield found if alone else pytree.tree_map_only(Tensor, Tensor.clone, found), sample_count(named)
