"""What became of a backend config: for each pattern its rule or why there is none, for each setter its effect."""

import io
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from quantplug.quantizers.importer.entries import PatternEntry

Effects: TypeAlias = tuple[tuple[str, str], ...]

NOT_APPLICABLE = "not applicable in PT2E because "
_SWAPS = f"{NOT_APPLICABLE}a q/dq graph keeps the operators: no module is swapped for another"
_NAMED = f"{NOT_APPLICABLE}patterns name the operands of the operators that they match"
_OBSERVATIONS = {
    "own": "input and output have observers of their own",
    "shared": "inputs and output share one observer",
    "none": "neither input nor output is observed",
}


@dataclass(frozen=True)
class ImportedPattern:
    """One pattern config and what became of it.

    Attributes:
        pattern: the pattern in words.
        rule: the rule of the backend that it became or is part of; "" if there is none.
        reason: why there is none; "" if there is one.
        effects: (setter, effect) for each setter that was used, or "not applicable in PT2E because ...".
    """

    pattern: str
    rule: str = ""
    reason: str = ""
    effects: Effects = ()


@dataclass(frozen=True)
class ImportReport:
    """What became of a backend config.

    Attributes:
        backend: the name of the backend.
        patterns: the pattern configs in their order.
    """

    backend: str
    patterns: tuple[ImportedPattern, ...]

    @property
    def imported(self) -> tuple[ImportedPattern, ...]:
        """The patterns that became a rule."""
        return tuple(found for found in self.patterns if found.rule)

    @property
    def not_applicable(self) -> tuple[ImportedPattern, ...]:
        """The patterns that did not."""
        return tuple(found for found in self.patterns if not found.rule)

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of the backend, each once."""
        return tuple(dict.fromkeys(found.rule for found in self.imported))

    @property
    def reasons(self) -> Counter[str]:
        """How many patterns did not become a rule, by the reason."""
        return Counter(found.reason for found in self.not_applicable)

    def summary(self) -> str:
        """Returns the numbers in one sentence."""
        return (
            f"{len(self.imported)} of {len(self.patterns)} patterns of '{self.backend}' became "
            f"{len(self.rules)} rules, {len(self.not_applicable)} are not applicable in PT2E."
        )

    def __str__(self) -> str:
        table = Table("pattern", "rule", "setter", "effect", title=self.summary(), title_justify="left")
        for found in self.patterns:
            first, *others = found.effects or (("set_pattern", NOT_APPLICABLE + found.reason),)
            table.add_row(found.pattern, found.rule or "-", *first)
            for effect in others:
                table.add_row("", "", *effect)
        text = io.StringIO()
        Console(width=160, file=text).print(table)
        return text.getvalue()


def effects(entry: PatternEntry, rule: str, observation: str, dtypes: Effects) -> Effects:
    """Returns what each used setter of a pattern config does.

    Args:
        entry: the pattern config.
        rule: the rule that it became.
        observation: "own", "shared" or "none".
        dtypes: the effects of its dtype configs.
    """
    given = "set_pattern" if entry.pattern is not None else "_set_pattern_complex_format"
    found = {
        given: f"rule '{rule}'",
        "set_observation_type": _OBSERVATIONS[observation],
    }
    reasons = {
        "set_root_module": (entry.root_module, _SWAPS),
        "set_qat_module": (entry.qat_module, f"{_SWAPS}, prepare_qat_pt2e puts fake quantizes around them"),
        "set_reference_quantized_module": (
            entry.reference_quantized_module,
            f"{NOT_APPLICABLE}the reference is the operator between dequantize and quantize",
        ),
        "set_fused_module": (entry.fused_module, _fused(entry)),
        "set_fuser_method": (
            entry.fuser_method,
            "nothing is quantized inside of the piece, a batch norm in it is folded; the function is not called",
        ),
        "_set_root_node_getter": (entry.root_node_getter, _NAMED),
        "_set_extra_inputs_getter": (entry.extra_inputs_getter, _NAMED),
        "_set_num_tensor_args_to_observation_type": (
            entry.num_tensor_args_to_observation_type,
            _by_count(entry),
        ),
        "_set_input_type_to_index": (
            entry.input_type_to_index,
            "weight and bias are told from activations",
        ),
    }
    used = tuple((setter, effect) for setter, (value, effect) in reasons.items() if value)
    return (*found.items(), *dtypes, *used)


def _fused(entry: PatternEntry) -> str:
    name = getattr(entry.fused_module, "__name__", entry.fused_module)
    return f"the config of {name} says how the piece is quantized; without one it stays float"


def _by_count(entry: PatternEntry) -> str:
    counts = (count for count in entry.num_tensor_args_to_observation_type if count)
    told = (f"{count} tensors: {_OBSERVATIONS[entry.observation(count)]}" for count in sorted(counts))
    return "; ".join(told)
