"""What a backend can quantize, as data: one row for each rule that its annotators declare."""

from collections.abc import Iterable
from dataclasses import dataclass

from quantplug.annotators.constraints import OF_CONFIG
from quantplug.annotators.embedding import half_or_groups
from quantplug.annotators.groupwise import groups_beside_run_time, no_groups, whole_bytes
from quantplug.annotators.half import half_weight
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.graph.operators import Target
from quantplug.core.patterns.language import Pattern
from quantplug.core.peers.torch_names import schema_or_none
from quantplug.core.specs.dtypes import mode_of
from quantplug.quantizers.framework.backend import Backend


@dataclass(frozen=True)
class Capability:
    """One rule of a backend.

    Attributes:
        rule: its label, as reports show it.
        operators: the ATen overloads that the matched piece can consist of.
        output: where the scale of the output comes from: its "own" observer, "shared" with the input,
            "fixed" beforehand, or "float" for an output that is not quantized.
        configs: the names of the backend's configs under which the rule can fire.
        modes: what those configs are for: "static", "dynamic", "weight_only".
        dtypes: of the numbers that they store, such as "int8".
        level: how closely the kernel agrees with the q/dq graph: "exact", "one step" or "approximate".
    """

    rule: str
    operators: tuple[str, ...]
    output: str
    configs: tuple[str, ...]
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    level: str


def capabilities(backend: Backend) -> list[Capability]:
    """Returns the rules of a backend in the order of their declaration, each label once."""
    patterns: dict[str, tuple[Annotator, list[Pattern]]] = {}
    for annotator in backend.annotators:
        for label, pattern in annotator.patterns:
            patterns.setdefault(label, (annotator, []))[1].append(pattern)
    return [_capability(backend, label, *declared) for label, declared in patterns.items()]


def _capability(backend: Backend, label: str, annotator: Annotator, patterns: list[Pattern]) -> Capability:
    names = configs_of(backend, annotator)
    modes, dtypes = modes_of(backend, names), dtypes_of(backend, names)
    return Capability(label, _operators(patterns), annotator.output, names, modes, dtypes, annotator.level.value)


def _operators(patterns: list[Pattern]) -> tuple[str, ...]:
    targets: frozenset[Target] = frozenset().union(*(pattern.mentions() for pattern in patterns))
    return tuple(sorted(str(target) for target in targets if schema_or_none(target) is not None))


def capability_table(rows: Iterable[Capability]) -> str:
    """Returns rules as a Markdown table: those that differ in nothing but their operator stand in one line.

    Args:
        rows: what `capabilities` returned.
    """
    rows = list(rows)
    grouped: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if not any(_extends(row, other) for other in rows):
            fused = [other.rule.removeprefix(f"{row.rule}_") for other in rows if _extends(other, row)]
            alike = (", ".join(fused).replace("_", " + "), row.output, ", ".join(row.configs), row.level)
            grouped.setdefault(alike, []).append(row.rule)
    head = ["| operators | fused behind them | output qparams | configs | agreement |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join((', '.join(rules), *alike))} |" for alike, rules in grouped.items())])


def _extends(row: Capability, other: Capability) -> bool:
    """Tells whether a rule is another one with more operators fused behind it."""
    return row.rule.startswith(f"{other.rule}_") and set(row.operators) > set(other.operators)


# Constraints about the config alone, which hold or not for any match.
_OF_CONFIG = (*OF_CONFIG, whole_bytes, no_groups, groups_beside_run_time, half_weight, half_or_groups)


def configs_of(backend: Backend, annotator: Annotator) -> tuple[str, ...]:
    """Returns the names of the configs that no constraint of an annotator rules out as a whole."""
    checks = [check for check in annotator.constraints if check in _OF_CONFIG]
    return tuple(n for n in backend.configs if not any(check(None, backend.config(n)) for check in checks))


def modes_of(backend: Backend, configs: Iterable[str]) -> tuple[str, ...]:
    """Returns what some configs of a backend are for, each mode once: "static", "dynamic", "weight_only"."""
    inputs = (backend.config(name).input_activation for name in configs)
    modes = (mode_of(spec is not None, spec is not None and bool(spec.is_dynamic)) for spec in inputs)
    return tuple(dict.fromkeys(modes))


def dtypes_of(backend: Backend, configs: Iterable[str]) -> tuple[str, ...]:
    """Returns the dtypes of the numbers that some configs of a backend store, each once."""
    found = [backend.config(name) for name in configs]
    specs = [spec for c in found for spec in (c.input_activation, c.output_activation, c.weight) if spec is not None]
    return tuple(dict.fromkeys(str(spec.dtype).removeprefix("torch.") for spec in specs))
