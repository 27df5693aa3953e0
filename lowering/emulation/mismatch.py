"""How far emulated kernels are from the real ones, measured here and now.

Before: a kernel set and its cases. After: for each kernel its declared level, the deviation of the emulation
from the real kernel, and for comparison that of the q/dq graph.
"""

import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantplug.core.errors import ConfigError
from quantplug.core.specs.levels import Deviation, Level
from quantplug.lowering.emulation.cases import (
    SETTINGS,
    X86_CASES,
    XNNPACK_CASES,
    XNNPACK_RUN_TIME_CASES,
    Case,
    Integers,
    Setting,
    graph,
)
from quantplug.lowering.emulation.emulate import emulate, kernel_set
from quantplug.lowering.processor import highest_integer


@dataclass(frozen=True)
class Mismatch:
    """One kernel's agreement.

    Attributes:
        row: its name.
        level: what the kernel set declares.
        emulated: the emulation against the real kernel.
        reference: the q/dq graph against the real kernel.
    """

    row: str
    level: Level
    emulated: Deviation
    reference: Deviation

    @property
    def holds(self) -> bool:
        """Tells whether the emulation keeps the declared level."""
        return self.level.admits(self.emulated)


@dataclass(frozen=True)
class _Target:
    lowering: str
    graphs: tuple[tuple[Case, ...], ...]  # the cases of each graph: one of too many kinds does not run
    integers: Callable[[], Integers]


_TARGETS = {
    "xnnpack": _Target(
        "quantplug.lowering.xnnpack:lower", (XNNPACK_CASES, XNNPACK_RUN_TIME_CASES), lambda: (-128, 127, torch.int8)
    ),
    "x86": _Target("quantplug.lowering.x86:lower", (X86_CASES,), lambda: (0, highest_integer(), torch.uint8)),
}


def mismatches(kernels: str, settings: Sequence[Setting] = SETTINGS) -> tuple[Mismatch, ...]:
    """Runs every case on the real kernels, on the emulated ones and as a q/dq graph.

    Args:
        kernels: "xnnpack" or "x86"; its runtime must be installed.
        settings: quantization parameters to run all cases with.

    Raises:
        ConfigError: there is no such kernel set.
        LoweringError: the target refuses a case.
    """
    if kernels not in _TARGETS:
        raise ConfigError(f"There are no kernels '{kernels}' to compare with; choose one of {list(_TARGETS)}.")
    target, levels = _TARGETS[kernels], kernel_set(kernels).levels
    found: dict[str, list[tuple[Deviation, Deviation]]] = defaultdict(list)
    for setting in settings:
        for cases in target.graphs:
            for case, deviations in _measured(kernels, target, cases, setting):
                found[case.row].append(deviations)
    return tuple(
        Mismatch(row, level, *(Deviation.combined(side) for side in zip(*found[row], strict=True)))
        for row, level in levels.items()
        if row in found
    )


def _measured(
    kernels: str, target: _Target, cases: tuple[Case, ...], setting: Setting
) -> Iterable[tuple[Case, tuple[Deviation, Deviation]]]:
    model, scales, inputs = graph(cases, setting, target.integers())
    program = pkgutil.resolve_name(target.lowering)(model, inputs)
    emulated = emulate(model, inputs, kernels)
    with torch.no_grad():
        outputs = (program(*inputs), emulated(*inputs), model(*inputs))
    for case, scale, real, ours, reference in zip(cases, scales, *outputs, strict=True):
        yield case, (_deviation(ours, real, scale), _deviation(reference, real, scale))


def _deviation(found: Tensor, real: Tensor, scale: float) -> Deviation:
    return Deviation.between(found.contiguous(), real.contiguous(), scale)
