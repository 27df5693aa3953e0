"""What a backend can quantize, as data: one row for each rule that its annotators declare."""

from dataclasses import dataclass

from quantplug.annotators.constraints import static_only
from quantplug.core.annotator import Annotator
from quantplug.core.pattern import Pattern, Target
from quantplug.quantizers.backend import Backend


@dataclass(frozen=True)
class Capability:
    """One rule of a backend.

    Attributes:
        rule: its label, as reports show it.
        operators: the ATen overloads that the matched piece can consist of.
        output: where the scale of the output comes from: its "own" observer, "shared" with the input,
            "fixed" beforehand, or "float" for an output that is not quantized.
        configs: the names of the backend's configs under which the rule can fire.
    """

    rule: str
    operators: tuple[str, ...]
    output: str
    configs: tuple[str, ...]


def capabilities(backend: Backend) -> list[Capability]:
    """Returns the rules of a backend in the order of their declaration, each label once."""
    patterns: dict[str, tuple[Annotator, list[Pattern]]] = {}
    for annotator in backend.annotators:
        for label, pattern in annotator.patterns:
            patterns.setdefault(label, (annotator, []))[1].append(pattern)
    return [
        Capability(label, _operators(found), annotator.output, _configs(backend, annotator))
        for label, (annotator, found) in patterns.items()
    ]


def _operators(patterns: list[Pattern]) -> tuple[str, ...]:
    targets: frozenset[Target] = frozenset().union(*(pattern.mentions() for pattern in patterns))
    return tuple(sorted(str(target) for target in targets if hasattr(target, "_schema")))


def _configs(backend: Backend, annotator: Annotator) -> tuple[str, ...]:
    """Static rules need activations whose scales calibration finds; the others run under every config."""
    if static_only not in annotator.constraints:
        return tuple(backend.configs)
    activations = {name: backend.config(name).input_activation for name in backend.configs}
    return tuple(name for name, spec in activations.items() if spec is not None and not spec.is_dynamic)
