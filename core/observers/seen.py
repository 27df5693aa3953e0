"""What an observer has seen: a value that is replaced as tensors come, and never changed.

Before: tensors that flow through a prepared model. After: the state that an observer's kind makes of them, which can
be given back, saved, or merged with another run's.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import UniformQuantizationObserverBase

from quantplug.core.errors import CalibrationError
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


class Watcher(UniformQuantizationObserverBase):
    """Shows what comes to a kind's pure functions and keeps what they return.

    Attributes:
        seen: all that it has seen, as a value that can be given back to this observer or to its like.
        place: where it stands, for errors; "" where nobody said.
        nonfinite: "raise" on a NaN or an infinity, or "report": leave such elements out and count them.
    """

    per_channel: ClassVar[bool] = False
    form: ClassVar[type[Any]]
    seen: Seen
    place: str
    nonfinite: Literal["raise", "report"]

    @abstractmethod
    def updated(self, state: State | None, rows: Tensor) -> State:
        """Returns the state after one more tensor, given as float32 [channels or 1, n]; pure."""

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
