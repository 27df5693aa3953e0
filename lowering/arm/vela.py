"""Vela, Arm's compiler for Ethos-U: a TOSA graph as a command stream, and what it expects of the hardware.

Before: a TOSA graph and the name of an NPU. After: the stream as ExecuTorch's runtime reads it, and Vela's estimate.
"""

import contextlib
import csv
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantplug.core.errors import LoweringError, first_line


@dataclass(frozen=True)
class Estimate:
    """What Vela expects of one inference on an NPU; it simulates no memory but its own model of one.

    Attributes:
        cycles: of the NPU's clock.
        seconds: at the clock of Vela's own system configuration.
        macs: multiplications with addition.
        sram_bytes: of memory for activations.
    """

    cycles: int
    seconds: float
    macs: int
    sram_bytes: int

    def __add__(self, other: "Estimate") -> "Estimate":
        """Returns the estimate of two graphs one behind the other, which use the same memory in turn."""
        return Estimate(
            self.cycles + other.cycles,
            self.seconds + other.seconds,
            self.macs + other.macs,
            max(self.sram_bytes, other.sram_bytes),
        )


def compiled(flatbuffer: bytes, spec: Any) -> tuple[bytes, Estimate]:
    """Returns the command stream of a TOSA graph and Vela's estimate.

    Raises:
        LoweringError: Vela refuses the graph.
    """
    from executorch.backends.arm.arm_vela import vela_compile

    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        try:
            # It adds arguments to the list that it is given (ExecuTorch 1.4).
            stream = vela_compile(flatbuffer, list(spec.compiler_flags), intermediate_path=folder)
            return stream, _estimate(Path(folder, "output"))
        except (Exception, SystemExit) as error:
            said = next((line for line in printed.getvalue().splitlines() if "rror" in line), first_line(error))
            raise LoweringError(
                f"Vela does not compile the program for {spec.target} ({said.strip()}); keep the operator that it "
                "names float, or choose another target."
            ) from error


def _estimate(folder: Path) -> Estimate:
    (summary,) = folder.glob("*_summary_*.csv")
    with summary.open(newline="") as file:
        (row,) = csv.DictReader(file)
    return Estimate(
        cycles=int(float(row["cycles_total"])),
        seconds=float(row["inference_time"]),
        macs=int(float(row["nn_macs"])),
        sram_bytes=int(float(row["sram_memory_used"]) * 1024),
    )
