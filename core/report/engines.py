"""How fast each engine runs one q/dq graph on one machine, and which was chosen.

Before: times of the engines that could run the graph, and the sentences of those that could not. After: a value that
reports show and that a file can hold.
"""

from dataclasses import dataclass

HEADINGS = ("engine", "float parts", "microseconds", "quartiles", "times the chosen", "rounds", "why it is out")


@dataclass(frozen=True)
class EngineTime:
    """One engine, with what it does beside integers.

    Attributes:
        engine: its name, such as "openvino".
        float_dtype: what products that stay float compute in, "float32" or "bfloat16".
        microseconds: the median of a call over the rounds; None where it did not run.
        low: the lower quartile.
        high: the upper quartile.
        ratio: how many times as long as the chosen one it takes, the median over the rounds.
        rounds: in how many it took part.
        decibels: how near what it computes is to what the q/dq graph computes; None where it is the same, or where it
            did not run.
        reason: why it could not be chosen, or was timed no further; else empty.
    """

    engine: str
    float_dtype: str = "float32"
    microseconds: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    rounds: int = 0
    decibels: float | None = None
    reason: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """What a table shows of it, one text for each of `HEADINGS`."""
        if self.microseconds is None:
            return (self.engine, self.float_dtype, "-", "-", "-", "-", self.reason)
        quartiles = f"{self.low:.0f} - {self.high:.0f}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return (
            self.engine,
            self.float_dtype,
            f"{self.microseconds:.0f}",
            quartiles,
            ratio,
            f"{self.rounds}",
            self.reason,
        )


@dataclass(frozen=True)
class EngineTimes:
    """The engines that were asked for one graph.

    Attributes:
        rows: one for each way to run it.
        chosen: the place of the chosen one among the rows.
        inputs: dtypes and sizes of the inputs that they were timed on; of an open size its name and what it was.
        threads: how many they had.
        is_remembered: whether the times are those of an earlier call, and nothing was timed.
    """

    rows: tuple[EngineTime, ...]
    chosen: int
    inputs: str
    threads: int
    is_remembered: bool = False

    @property
    def winner(self) -> EngineTime:
        """The row that was chosen."""
        return self.rows[self.chosen]

    def summary(self) -> str:
        """Returns what was chosen in one sentence."""
        found, threads = self.winner, f"{self.threads} thread{'s' * (self.threads != 1)}"
        floats = " with its float parts in bfloat16" if found.float_dtype == "bfloat16" else ""
        taken = "" if found.microseconds is None else f", {found.microseconds:.0f} microseconds a call"
        told = "remembered from an earlier call" if self.is_remembered else "timed in turns"
        return (
            f"Engine '{found.engine}'{floats} is chosen of {len(self.rows)}{taken} on {self.inputs or 'no tensors'} "
            f"with {threads}, {told}."
        )
