"""What every observer here is: an immutable state, a pure update and a pure search for the range.

Before: tensors that flow through a prepared model. After: `calculate_qparams()` gives scale and
zero point. The classes have torchao's observer interface, so that they stand in a
`QuantizationSpec.observer_or_fake_quant_ctr` and work in torchao's own prepare and convert.

Since a state is never changed but replaced, a run can be rolled back, saved, and merged with the
runs of other processes by keeping references. Weights (`nn.Parameter`) are not copied into a state
at all: the observer remembers the parameter and reads it when its range is asked for.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import UniformQuantizationObserverBase

from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.observers.scheme import Scheme, integer_range, symmetric_zero
from quantplug.core.peers.torch_names import version_of

State = tuple[Tensor, ...]


class NonFiniteError(CalibrationError):
    """An observer was given NaN or infinity."""


NonFinite = Literal["raise", "report"]
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric, torch.per_channel_affine_float_qparams)
_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)


class DataObserver(UniformQuantizationObserverBase):
    """Base of the observers: options, state keeping, and scale and zero point from the range found.

    A subclass names its kind of state, a NamedTuple, as `form`, and says with `per_channel` whether it
    keeps one range for each channel, with `dynamic` whether it may stand for a range found at run time,
    and with `ordered` whether the order of the tensors matters.

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

    per_channel: ClassVar[bool] = False
    dynamic: ClassVar[bool] = False
    ordered: ClassVar[bool] = False
    form: ClassVar[type[Any]]

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
        nonfinite: NonFinite = "raise",
    ) -> None:
        name = type(self).__name__
        qscheme = self._checked_scheme(qscheme, is_dynamic, eps, nonfinite)
        low, high = integer_range(dtype, quant_min, quant_max, reduce_range, name)
        explicit = quant_min is not None or quant_max is not None or reduce_range
        symmetric = qscheme in _SYMMETRIC
        super().__init__(dtype, qscheme, False, low, high, factory_kwargs, eps, is_dynamic)
        self.reduce_range, self.has_customized_qrange = reduce_range, explicit
        self.ch_axis, self.nonfinite = ch_axis, nonfinite
        self.scheme = Scheme(
            low, high, symmetric, symmetric_zero(dtype, low, high, explicit) if symmetric else 0, eps, power_of_two,
            qscheme == torch.per_channel_affine_float_qparams,
        )  # fmt: skip
        self.site = ""
        self.nonfinite_elements = 0
        self._state: State | None = None
        self._constants: tuple[nn.Parameter, ...] = ()
        self._found: tuple[Any, int, Tensor, Tensor] | None = None

    def _checked_scheme(
        self, qscheme: torch.qscheme | None, is_dynamic: bool, eps: float, nonfinite: str
    ) -> torch.qscheme:
        name, allowed = type(self).__name__, _PER_CHANNEL if self.per_channel else _PER_TENSOR
        if qscheme is None:
            qscheme = allowed[0]
        if qscheme not in allowed:
            raise ConfigError(f"{name} has qscheme {qscheme}; choose one of {[str(s) for s in allowed]}.")
        if is_dynamic and not self.dynamic:
            raise ConfigError(f"{name} finds its range by calibration and cannot be dynamic; use MinMaxObserver.")
        if not (0 < eps < float("inf")):
            raise ConfigError(f"{name} has eps {eps}; pass a positive smallest scale, such as 2**-12.")
        if nonfinite not in ("raise", "report"):
            raise ConfigError(f"{name} has nonfinite '{nonfinite}'; choose 'raise' or 'report'.")
        return qscheme

    # --- data in

    def forward(self, x: Tensor) -> Tensor:
        """Takes note of a tensor and returns it unchanged.

        Raises:
            CalibrationError: the tensor is complex or boolean, holds NaN or infinity (where
                `nonfinite` is "raise"), or has another number of channels than those before.
        """
        if type(x) is nn.Parameter and self._took_constant(x):
            return x
        self.observe([x])
        return x

    def observe(self, tensors: Sequence[Tensor]) -> None:
        """Updates the state with tensors, in order; empty ones leave no trace.

        Raises:
            CalibrationError: as for `forward`; the state is as before.
        """
        self._settle_constant()
        state = self._state
        for tensor in tensors:
            if tensor.numel():
                state = self.updated(self.moved(state, tensor.device), self.rows(tensor))
        self._state = state

    @abstractmethod
    def updated(self, state: State | None, rows: Tensor) -> State:
        """Returns the state after one more tensor, given as float32 [channels or 1, n]; pure."""

    @abstractmethod
    def merged(self, first: State, second: State) -> State:
        """Returns the state of both runs' data; pure."""

    def _took_constant(self, parameter: nn.Parameter) -> bool:
        """Remembers the first parameter that comes as the only data; further visits cost nothing."""
        if self._state is None and not self._constants:
            # In a tuple: as an attribute of its own it would become a parameter of this module.
            self._constants = (parameter,)
            return True
        return self.constant is parameter

    def _settle_constant(self) -> None:
        """Counts the remembered parameter into the state, since other data joins it."""
        if self._constants:
            self._state, self._constants = self.state, ()

    def rows(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's elements as float32 [channels or 1, n].

        Raises:
            CalibrationError: it is complex or boolean, or has no such channel axis.
        """
        tensor = tensor.detach()
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise CalibrationError(
                f"{self.where()} was given a tensor of {tensor.dtype}; only real numbers have a range, so leave this "
                "tensor float."
            )
        if not self.per_channel:
            return _dense(tensor).to(torch.float32)[None]
        if not -tensor.dim() <= self.ch_axis < tensor.dim():
            raise CalibrationError(
                f"{self.where()} has channel axis {self.ch_axis} but was given a tensor of shape {list(tensor.shape)}; "
                "set the spec's ch_axis."
            )
        return tensor.movedim(self.ch_axis, 0).unsqueeze(-1).flatten(1).to(torch.float32).contiguous()

    def where(self) -> str:
        """Returns how errors and reports name this observer."""
        return f"{type(self).__name__} of {self.site}" if self.site else type(self).__name__

    # --- state

    @property
    def has_data(self) -> bool:
        """Tells whether any element has been seen."""
        return self._state is not None or bool(self._constants)

    @property
    def constant(self) -> nn.Parameter | None:
        """The parameter that is all that was seen, or None."""
        return self._constants[0] if self._constants else None

    @property
    def state(self) -> State | None:
        """Everything that was seen, as tensors that nobody changes; None before the first data."""
        return self._state if self.constant is None else self.updated(None, self.rows(self.constant))

    @state.setter
    def state(self, state: State | None) -> None:
        # Past nn.Module's own way, which looks for parameters and modules in every value.
        self.__dict__.update(_state=state, _constants=(), _found=None)

    @property
    def data(self) -> tuple[State | None, tuple[nn.Parameter, ...], int]:
        """All that was seen, as a value that can be given back to this observer or to its like."""
        return self._state, self._constants, self.nonfinite_elements

    @data.setter
    def data(self, data: tuple[State | None, tuple[nn.Parameter, ...], int]) -> None:
        self._state, self._constants, self.nonfinite_elements = data
        self._found = None

    def reset_min_max_vals(self) -> None:
        """Forgets all data."""
        self.state = None

    @property
    def min_val(self) -> Tensor:
        """Smallest value seen, float32 (per channel [channels]); inf before the first data."""
        return self._extreme(0, float("inf"))

    @property
    def max_val(self) -> Tensor:
        """Largest value seen, float32 (per channel [channels]); -inf before the first data."""
        return self._extreme(1, float("-inf"))

    def _extreme(self, which: int, nothing: float) -> Tensor:
        if not self.has_data:
            return torch.tensor([]) if self.per_channel else torch.tensor(nothing)
        # A parameter's extremes need no histogram.
        seen = self._state if self.constant is None else self.checked_extremes(self.rows(self.constant))
        assert seen is not None
        end = seen[which]
        assert end is not None
        return end if self.per_channel else end[0]

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
        self.state = None if state["state"] is None else self.restored(state["state"])

    def restored(self, tensors: Sequence[Tensor]) -> State:
        """Returns the state that consists of these tensors."""
        state: State = self.form(*tensors)
        return state

    def moved(self, state: State | None, device: torch.device) -> State | None:
        """Returns a state on a device: one from a checkpoint or another process comes on the host."""
        if state is None or state[0].device == device:
            return state
        return self.restored([tensor.to(device) for tensor in state])

    # --- range out

    def search_key(self) -> tuple[Any, ...]:
        """Returns a value that is equal for observers whose ranges `search` may find in one call."""
        return (type(self), self.scheme)

    def update_key(self) -> tuple[Any, ...]:
        """Returns a value that is equal for observers whose states `updated` may treat as rows of one."""
        return (type(self).updated, self.nonfinite)

    @abstractmethod
    def search(self, state: State) -> tuple[Tensor, Tensor]:
        """Returns the ends of the range to quantize, float32 [rows], for the rows of a state; pure."""

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Returns low and high end of the range to quantize, float32 [channels or 1].

        Raises:
            CalibrationError: no data was seen.
        """
        if not self.has_data:
            raise CalibrationError(
                f"{self.where()} has seen no data; calibrate the prepared model with at least one batch that reaches "
                "it."
            )
        if self.found is None:
            state = self.state
            assert state is not None
            self.remember(*self.search(state))
        assert self.found is not None
        return self.found

    def remember(self, low: Tensor, high: Tensor) -> None:
        """Keeps the range that was found for what has been seen so far, so that it is not searched again."""
        self._found = (*self._seen(), low, high)

    @property
    def found(self) -> tuple[Tensor, Tensor] | None:
        """The range found for what has been seen so far, or None where it was not searched yet."""
        if self._found is None or self._found[0] is not self._seen()[0] or self._found[1] != self._seen()[1]:
            return None
        return self._found[2], self._found[3]

    def _seen(self) -> tuple[Any, int]:
        # States are replaced, never changed; a parameter that an optimizer changed in place has a new version.
        return (self._state, 0) if self.constant is None else (self.constant, version_of(self.constant))

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Returns scale (float32) and zero point (int64), each [channels] or [1].

        Raises:
            CalibrationError: no data was seen.
        """
        return self.scheme.qparams(*self.ranges())

    def extra_repr(self) -> str:
        """Returns scheme and range as text."""
        return f"{self.dtype}, {self.quant_min}..{self.quant_max}, min_val={self.min_val}, max_val={self.max_val}"

    def checked_extremes(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns each row's smallest and largest finite value, and where values are finite (None: everywhere).

        Raises:
            CalibrationError: a value is NaN or infinite and `nonfinite` is "raise".
        """
        low, high = torch.aminmax(rows, dim=1) if rows.shape[0] > 1 else (e[None] for e in torch.aminmax(rows))
        if bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
            return low, high, None
        finite = torch.isfinite(rows)
        spoiled = int(rows.numel() - finite.sum())
        if self.nonfinite == "raise":
            raise NonFiniteError(
                f"{self.where()} was given {spoiled} NaN or infinite values among {rows.numel()}; find the operator "
                "that makes them, or calibrate with nonfinite='skip' or 'report'."
            )
        self.nonfinite_elements += spoiled
        infinity = torch.tensor(float("inf"), device=rows.device)
        return torch.where(finite, rows, infinity).amin(1), torch.where(finite, rows, -infinity).amax(1), finite


def _dense(tensor: Tensor) -> Tensor:
    """Returns the elements as a vector in memory order where that needs no copy, else in logical order."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if tensor.dim() == (4 if layout is torch.channels_last else 5) and tensor.is_contiguous(memory_format=layout):
            return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)
