"""What every observer here is: an immutable state, a pure update and a pure search for the range.

Before: tensors that flow through a prepared model. After: `calculate_qparams()` gives scale and
zero point. The classes have torchao's observer interface, so that they stand in a
`QuantizationSpec.observer_or_fake_quant_ctr` and work in torchao's own prepare and convert.

Since a state is never changed but replaced, a run can be rolled back, saved, and merged with the
runs of other processes by keeping references. Weights (`nn.Parameter`) are not copied into a state
at all: the observer remembers the parameter and reads it when its range is asked for.
"""

from abc import abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.observers.scheme import checked_qscheme, scheme_of
from quantplug.core.observers.seen import Seen, State, Watcher


class DataObserver(Watcher):
    """Base of the observers: their options, and from what was seen to a range and its scale and zero point.

    A subclass names its kind of state, a NamedTuple, as `form`, and the options of its own that its range
    depends on as `options`. It says with `per_channel` whether it keeps one range for each channel, with `dynamic`
    whether it may stand for a range found at run time, and with `ordered` whether the order of the tensors matters.

    Args:
        dtype: integer type of the quantized tensor.
        qscheme: torch's scheme; per channel for the PerChannel classes, else per tensor.
        reduce_range: drops one bit of the integer range.
        quant_min: smallest integer, None for the dtype's.
        quant_max: largest integer, None for the dtype's.
        eps: smallest scale.
        is_dynamic: the range is found at run time, and the observer is a placeholder.
        ch_axis: channel axis of the PerChannel classes.
        power_of_two: scales are powers of two.
        nonfinite: "raise" on a NaN or an infinity, or "report": leave such elements out and count them.

    Raises:
        ConfigError: an option is out of its domain or does not go with another.
    """

    dynamic: ClassVar[bool] = False
    ordered: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        dtype: torch.dtype = torch.int8,
        qscheme: torch.qscheme | None = None,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = torch.finfo(torch.float32).eps,
        is_dynamic: bool = False,
        ch_axis: int = 0,
        power_of_two: bool = False,
        nonfinite: Literal["raise", "report"] = "raise",
    ) -> None:
        name = type(self).__name__
        qscheme = checked_qscheme(qscheme, self.per_channel, name)
        if is_dynamic and not self.dynamic:
            raise ConfigError(f"{name} finds its range by calibration and cannot be dynamic; use MinMaxObserver.")
        if nonfinite not in ("raise", "report"):
            raise ConfigError(f"{name} has nonfinite '{nonfinite}'; choose 'raise' or 'report'.")
        scheme = scheme_of(dtype, qscheme, quant_min, quant_max, reduce_range, eps, power_of_two, name)
        limits = (scheme.quant_min, scheme.quant_max)
        super().__init__(dtype, qscheme, False, *limits, factory_kwargs, eps, is_dynamic)
        self.scheme, self.ch_axis, self.nonfinite, self.reduce_range = scheme, ch_axis, nonfinite, reduce_range
        self.has_customized_qrange = (quant_min, quant_max, reduce_range) != (None, None, False)
        self.seen, self.place = Seen(), ""

    @abstractmethod
    def merged(self, first: State, second: State) -> State:
        """Returns the state of both runs' data; pure."""

    @abstractmethod
    def search(self, state: State) -> tuple[Tensor, Tensor]:
        """Returns the ends of the range to quantize, float32 [rows], for the rows of a state; pure."""

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Returns low and high end of the range to quantize, float32 [channels or 1].

        Raises:
            CalibrationError: no data was seen.
        """
        if self.seen.range is not None:
            return self.seen.range
        state = self.state
        if state is None:
            raise CalibrationError(
                f"{self.where()} has seen no data; calibrate the prepared model with at least one batch that reaches "
                "it."
            )
        found = self.search(state)
        self.seen = self.seen.with_range(*found)
        return found

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Returns scale (float32) and zero point (int64), each [channels] or [1].

        Raises:
            CalibrationError: no data was seen.
        """
        return self.scheme.qparams(*self.ranges())

    @property
    def min_val(self) -> Tensor:
        """Smallest value seen, float32 (per channel [channels]); inf before the first data."""
        return _extreme(self, 0, float("inf"))

    @property
    def max_val(self) -> Tensor:
        """Largest value seen, float32 (per channel [channels]); -inf before the first data."""
        return _extreme(self, 1, float("-inf"))

    def extra_repr(self) -> str:
        """Returns scheme and range as text."""
        return f"{self.dtype}, {self.quant_min}..{self.quant_max}, min_val={self.min_val}, max_val={self.max_val}"


def search_key(observer: DataObserver) -> tuple[Any, ...]:
    """Returns a value that is equal for observers whose ranges `search` may find in one call."""
    return (type(observer), observer.scheme, *(getattr(observer, name) for name in observer.options))


def update_key(observer: DataObserver) -> Hashable:
    """Returns a value that is equal for observers whose states `updated` may treat as rows of one."""
    return (type(observer).updated, observer.nonfinite, *(getattr(observer, name) for name in observer.options))


def _extreme(observer: DataObserver, which: int, nothing: float) -> Tensor:
    if not observer.has_data:
        return torch.tensor([]) if observer.per_channel else torch.tensor(nothing)
    constant = observer.seen.constant
    # A parameter's extremes need no histogram.
    ends = observer.seen.state if constant is None else observer.checked_extremes(observer.rows(constant))
    assert ends is not None
    end = ends[which]
    assert end is not None
    return end if observer.per_channel else end[0]
