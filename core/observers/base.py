"""What every observer here is: an immutable state, a pure update and a pure search for the range.

Before: tensors that flow through a prepared model. After: `calculate_qparams()` gives scale and
zero point. The classes have torchao's observer interface, so that they stand in a
`QuantizationSpec.observer_or_fake_quant_ctr` and work in torchao's own prepare and convert.

Since a state is never changed but replaced, a run can be rolled back, saved, and merged with the
runs of other processes by keeping references. Weights (`nn.Parameter`) are not copied into a state
at all: the observer remembers the parameter and reads it when its range is asked for.
"""

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import UniformQuantizationObserverBase

from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.observers.scheme import checked_qscheme, scheme_of
from quantplug.core.peers.torch_names import version_of

State = tuple[Tensor, ...]
"""The form of an observer's kind, a NamedTuple, as tensors that nobody changes."""


class NonFiniteError(CalibrationError):
    """An observer was given NaN or infinity."""


class Seen(NamedTuple):
    """All that an observer has seen, and the range that was found for it; a value, never changed but replaced.

    Attributes:
        state: what its kind keeps of the data; None before the first data, and where a parameter is all of it.
        constant: the parameter that is all that was seen, which is read when its range is asked for.
        nonfinite_elements: NaN and infinite elements that were left out.
        found: the constant's version, low and high end of the range, once it was searched.
    """

    state: State | None = None
    constant: nn.Parameter | None = None
    nonfinite_elements: int = 0
    found: tuple[int, Tensor, Tensor] | None = None

    @property
    def has_data(self) -> bool:
        """Tells whether there was any element."""
        return self.state is not None or self.constant is not None

    @property
    def range(self) -> tuple[Tensor, Tensor] | None:
        """The range found for just this, or None where it was not searched yet."""
        return None if self.found is None or self.found[0] != self._version else self.found[1:]

    def with_range(self, low: Tensor, high: Tensor) -> "Seen":
        """Returns the same with the range that was found for it, so that it is not searched again."""
        return self._replace(found=(self._version, low, high))

    @property
    def _version(self) -> int:
        # An optimizer changes a parameter in place, and gives it a new version.
        return 0 if self.constant is None else version_of(self.constant)


def on_device(state: State | None, device: torch.device) -> State | None:
    """Returns a state on a device: one from a checkpoint or another process comes on the host."""
    if state is None or state[0].device == device:
        return state
    return type(state)(*(tensor.to(device) for tensor in state))


class DataObserver(UniformQuantizationObserverBase):
    """Base of the observers: shows what comes to the kind's pure functions and keeps what they return.

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

    Attributes:
        seen: all that it has seen, as a value that can be given back to this observer or to its like.
        place: where it stands, for errors; "" where nobody said.

    Raises:
        ConfigError: an option is out of its domain or does not go with another.
    """

    per_channel: ClassVar[bool] = False
    dynamic: ClassVar[bool] = False
    ordered: ClassVar[bool] = False
    form: ClassVar[type[Any]]
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
    def updated(self, state: State | None, rows: Tensor) -> State:
        """Returns the state after one more tensor, given as float32 [channels or 1, n]; pure."""

    @abstractmethod
    def merged(self, first: State, second: State) -> State:
        """Returns the state of both runs' data; pure."""

    @abstractmethod
    def search(self, state: State) -> tuple[Tensor, Tensor]:
        """Returns the ends of the range to quantize, float32 [rows], for the rows of a state; pure."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes note of a tensor and returns it unchanged.

        A parameter that comes as the first and only data is remembered; its further visits cost nothing.

        Raises:
            CalibrationError: the tensor is complex or boolean, holds NaN or infinity (where
                `nonfinite` is "raise"), or has another number of channels than those before.
        """
        if type(x) is nn.Parameter and not self.seen.has_data:
            self.seen = self.seen._replace(constant=x)
        elif self.seen.constant is not x:
            self.observe([x])
        return x

    def observe(self, tensors: Sequence[Tensor]) -> None:
        """Updates the state with tensors, in order; empty ones leave no trace.

        Raises:
            CalibrationError: as for `forward`; the state is as before.
        """
        state = self.state
        for tensor in tensors:
            if tensor.numel():
                state = self.updated(on_device(state, tensor.device), self.rows(tensor))
        self.state = state

    def rows(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's elements as float32 [channels or 1, n].

        Raises:
            CalibrationError: it is complex or boolean, or has no such channel axis.
        """
        return rows_of(tensor, self.ch_axis if self.per_channel else None, self.where())

    def checked_extremes(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns each row's smallest and largest finite value, and where values are finite (None: everywhere).

        Raises:
            CalibrationError: a value is NaN or infinite and `nonfinite` is "raise".
        """
        low, high, finite = finite_extremes(rows)
        if finite is None:
            return low, high, None
        spoiled = int(rows.numel() - finite.sum())
        if self.nonfinite == "raise":
            raise NonFiniteError(
                f"{self.where()} was given {spoiled} NaN or infinite values among {rows.numel()}; find the operator "
                "that makes them, or calibrate with nonfinite='skip' or 'report'."
            )
        self.seen = self.seen._replace(nonfinite_elements=self.seen.nonfinite_elements + spoiled)
        return low, high, finite

    def where(self) -> str:
        """Returns how errors and reports name this observer."""
        return f"{type(self).__name__} of {self.place}" if self.place else type(self).__name__

    @property
    def has_data(self) -> bool:
        """Tells whether any element has been seen."""
        return self.seen.has_data

    @property
    def state(self) -> State | None:
        """Everything that was seen, as tensors that nobody changes; None before the first data."""
        constant = self.seen.constant
        return self.seen.state if constant is None else self.updated(None, self.rows(constant))

    @state.setter
    def state(self, state: State | None) -> None:
        # Past nn.Module's own way, which looks for parameters and modules in every value.
        self.__dict__["seen"] = Seen(state, nonfinite_elements=self.seen.nonfinite_elements)

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

    def reset_min_max_vals(self) -> None:
        """Forgets all data."""
        self.state = None

    def get_extra_state(self) -> dict[str, Any]:
        """Returns what `state_dict` keeps of this observer."""
        state = self.state
        return {"format": 1, "state": None if state is None else tuple(state)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes what `get_extra_state` returned.

        Raises:
            CalibrationError: it is not such a value.
        """
        if not isinstance(state, dict) or state.get("format") != 1:
            raise CalibrationError(f"{self.where()} cannot read the saved state; it is not one of format 1.")
        self.state = None if state["state"] is None else self.form(*state["state"])

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


def rows_of(tensor: Tensor, axis: int | None, where: str) -> Tensor:
    """Returns a tensor's elements as float32 [channels, n], or [1, n] where there is no channel axis.

    Args:
        tensor: real numbers.
        axis: channel axis, None for one range for the whole tensor.
        where: how errors name the observer.

    Raises:
        CalibrationError: the tensor is complex or boolean, or has no such axis.
    """
    tensor = tensor.detach()
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise CalibrationError(
            f"{where} was given a tensor of {tensor.dtype}; only real numbers have a range, so leave this tensor float."
        )
    if axis is None:
        return _dense(tensor).to(torch.float32)[None]
    if not -tensor.dim() <= axis < tensor.dim():
        raise CalibrationError(
            f"{where} has channel axis {axis} but was given a tensor of shape {list(tensor.shape)}; set the spec's "
            "ch_axis."
        )
    return tensor.movedim(axis, 0).unsqueeze(-1).flatten(1).to(torch.float32).contiguous()


def _dense(tensor: Tensor) -> Tensor:
    """Returns the elements as a vector in memory order where that needs no copy, else in logical order."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if tensor.dim() == (4 if layout is torch.channels_last else 5) and tensor.is_contiguous(memory_format=layout):
            return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def finite_extremes(rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns each row's smallest and largest finite value, and where values are finite (None: everywhere)."""
    low, high = torch.aminmax(rows, dim=1) if rows.shape[0] > 1 else (e[None] for e in torch.aminmax(rows))
    if bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
        return low, high, None
    finite = torch.isfinite(rows)
    infinity = torch.tensor(float("inf"), device=rows.device)
    return torch.where(finite, rows, infinity).amin(1), torch.where(finite, rows, -infinity).amax(1), finite
