"""The numbers that the observers of one graph have found.

Before: observers that have seen their data. After: for each of them its quantization, asked for once, and a graph
without observers of tensors that are quantized so already.
"""

from collections.abc import Iterable

from torch import fx, nn

from quantplug.core.observers import DataObserver
from quantplug.core.observers.together import find_ranges
from quantplug.core.observers.torchao_histogram import calculate_qparams_together
from quantplug.core.pt2e.observed import Calls, in_words, origin
from quantplug.core.pt2e.quantization import Quantization, kind_of, static_quantization


class Numbers:
    """The quantizations of observers; their scales and zero points are computed together."""

    def __init__(self, observers: Iterable[nn.Module]) -> None:
        each = list(dict.fromkeys(observers))
        find_ranges(observer for observer in each if isinstance(observer, DataObserver))
        self._qparams = calculate_qparams_together(each)
        self._quantizations: dict[nn.Module, Quantization] = {}

    def quantization(self, call: fx.Node, observer: nn.Module) -> Quantization:
        """Returns the quantization of a static observer; errors name the call.

        Raises:
            CalibrationError: what it observed was not finite.
            ConvertError: the observer, or what derives its numbers from those of others, fails.
        """
        if observer not in self._quantizations:
            where = f"'{origin(call).name}' ({call.target})"
            with in_words(call, observer):
                self._quantizations[observer] = static_quantization(observer, where, self._qparams.get(observer))
        return self._quantizations[observer]

    def are_alike(self, *calls: tuple[fx.Node, nn.Module]) -> bool:
        """Tells whether two calls quantize to the same integers."""
        if any(kind_of(observer) != "static" for _, observer in calls):
            return False
        one, other = (self.quantization(call, observer) for call, observer in calls)
        return one.equals(other)


def without_repeated(graph: fx.Graph, observers: Calls, numbers: Numbers) -> Calls:
    """Takes out observers of tensors that are quantized so already: the second pair would change nothing.

    They stand between two quantizers whose specs differ in words only, or came to the same numbers.
    """
    kept: Calls = {}
    for call, observer in observers.items():
        read = call.all_input_nodes[0]
        if read in kept and numbers.are_alike((read, kept[read]), (call, observer)):
            call.replace_all_uses_with(read)
            graph.erase_node(call)
        else:
            kept[call] = observer
    return kept
