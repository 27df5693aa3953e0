"""What `calibrate` can be asked for: each option's name, type, default and meaning stand here, once."""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from functools import update_wrapper
from inspect import getdoc, signature
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, get_args

import torch
from torch import fx

from quantplug.core.errors import CalibrationError, did_you_mean, shown

NonFinitePolicy: TypeAlias = Literal["raise", "skip", "report"]
MisfitPolicy: TypeAlias = Literal["raise", "skip"]
FindingPolicy: TypeAlias = Literal["raise", "report"]

_CHOICES = {"nonfinite": NonFinitePolicy, "misfit": MisfitPolicy, "dead": FindingPolicy, "constant": FindingPolicy}


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of `calibrate`.

    Attributes:
        limit: at most so many batches, or None for all; no more are taken from the loader.
        progress: shows a bar with rate and remaining time where the output is a terminal.
        inputs: picks the model's inputs out of a batch, e.g. `lambda batch: batch[0]`.
        device: where batches are moved; None leaves them where they are.
        seed: seeds torch's and Python's random numbers for the run (a shuffling loader, random operators).
        nonfinite: what to do about NaN and infinity in a batch or in a value inside the model: "raise",
            "skip" the batch, or leave the elements out and "report" them.
        misfit: what to do about a batch whose inputs' number, names, shapes or dtypes are not the model's:
            "raise" or "skip" it.
        dead: what to do about observers that no data reached: "raise" or "report".
        constant: the same about observers that saw a single value, and channels that kept one.
        tolerance: ends the run early once no end of a range has moved by more than this share of the
            range over two checks in a row.
        check_every: batches between these checks.
        checkpoint: file to save the run in (with ".rankN" appended where there are several processes).
            Removed when the run is complete.
        checkpoint_every: batches between two saves.
        resume: takes up an existing checkpoint; the loader must then yield the same batches again.
        timeout: seconds to wait for the other processes.
    """

    limit: int | None = None
    progress: bool = True
    _: KW_ONLY
    inputs: Callable[[Any], Any] | None = None
    device: torch.device | str | None = None
    seed: int | None = None
    nonfinite: NonFinitePolicy = "raise"
    misfit: MisfitPolicy = "raise"
    dead: FindingPolicy = "report"
    constant: FindingPolicy = "report"
    tolerance: float | None = None
    check_every: int = 8
    checkpoint: str | Path | None = None
    checkpoint_every: int = 16
    resume: bool = True
    timeout: float = 1800.0

    def check(self) -> None:
        """Refuses values out of their domains.

        Raises:
            CalibrationError: there is one.
        """
        for name in ("limit", "check_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise CalibrationError(f"{name} is {shown(repr(value))}; pass a number of batches of at least 1.")
        for name, policy in _CHOICES.items():
            if getattr(self, name) not in get_args(policy):
                raise CalibrationError(f"{name} is '{getattr(self, name)}'; choose one of {list(get_args(policy))}.")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise CalibrationError(f"tolerance is {self.tolerance}; pass a share of the range between 0 and 1.")

    def target(self) -> torch.device | None:
        """Returns where batches are moved, None to leave them.

        Raises:
            CalibrationError: there is no such device.
        """
        try:
            return None if self.device is None else torch.device(self.device)
        except RuntimeError as error:
            raise CalibrationError(f"device is '{self.device}'; pass one that torch.device takes, as 'cpu'.") from error


Given = ParamSpec("Given")
Result = TypeVar("Result")
Calibration: TypeAlias = Callable[[fx.GraphModule, Iterable[Any], CalibrationOptions], Result]


def with_options(
    options: Callable[Given, CalibrationOptions],
) -> Callable[[Calibration[Result]], Callable[Concatenate[fx.GraphModule, Iterable[Any], Given], Result]]:
    """Lets a function of a prepared model, a loader and options be called with the options by their names.

    Type checkers, editors and `help` see each option with its default; an unknown one is a `CalibrationError`.

    Args:
        options: the class of the options.
    """
    known = signature(options).parameters

    def decorate(
        function: Calibration[Result],
    ) -> Callable[Concatenate[fx.GraphModule, Iterable[Any], Given], Result]:
        def called(
            prepared: fx.GraphModule, loader: Iterable[Any], *given: Given.args, **named: Given.kwargs
        ) -> Result:
            unknown = next((name for name in named if name not in known), None)
            if unknown is not None:
                raise CalibrationError(
                    f"{function.__name__} has no option '{unknown}'{did_you_mean(unknown, known)}; choose among "
                    f"{', '.join(known)}."
                )
            return function(prepared, loader, options(*given, **named))

        update_wrapper(called, function)
        *operands, _ = signature(function).parameters.values()
        told = signature(function).replace(parameters=[*operands, *known.values()])
        called.__signature__ = told  # type: ignore[attr-defined]
        called.__doc__ = f"{getdoc(function)}\n\n{getdoc(options)}"
        return called  # type: ignore[return-value]  # prepared and loader may be named as well

    return decorate
