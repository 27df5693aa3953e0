"""Backends made of backends: one like another, and one that takes what any of several takes."""

from dataclasses import fields, replace
from typing import Any

from quantplug.core.annotation.annotator import Annotator
from quantplug.core.errors import ConfigError
from quantplug.quantizers.framework.backend import Backend


def derive(
    base: Backend, name: str, *, add: tuple[Annotator, ...] = (), remove: tuple[str, ...] = (), **changes: Any
) -> Backend:
    """Returns a backend like another one under a name of its own; the other stays as it is.

    Args:
        base: the backend to start from.
        name: the name of the new one.
        add: annotators that come before those of the base, so that they win where pieces are equally large.
        remove: names of annotators to leave out, or labels of single patterns such as "conv_relu".
        changes: other attributes of `Backend` to replace, such as `lowering` or `dtypes`. Another lowering has
            other kernels: `kernels` and `engines` are those of the base only if the lowering is.

    Raises:
        ConfigError: `remove` names nothing of the base, `changes` no attribute, or the result is no backend.
    """
    known = {a.name for a in base.annotators} | {label for a in base.annotators for label, _ in a.patterns}
    unknown = [wanted for wanted in remove if wanted not in known]
    if unknown:
        raise ConfigError(f"Backend '{base.name}' has no rule {unknown[0]!r} to remove; it has {sorted(known)}.")
    changeable = [found.name for found in fields(Backend) if found.name not in ("name", "annotators")]
    strange = next((attribute for attribute in changes if attribute not in changeable), None)
    if strange is not None:
        raise ConfigError(
            f"Backend '{name}' cannot be derived from '{base.name}' with '{strange}'; change rows by add and remove, "
            f"or one of {changeable}."
        )
    kept = [_without(a, remove) for a in base.annotators if a.name not in remove]
    rows = (*add, *(a for a in kept if a.patterns))
    own: dict[str, Any] = {"kernels": None, "engines": {}} if "lowering" in changes else {}
    return replace(base, name=name, annotators=rows, **{**own, **changes})


def union(name: str, *bases: Backend, **changes: Any) -> Backend:
    """Returns a backend that takes what any of several takes; the earlier one wins.

    Args:
        name: the name of the new one.
        bases: the backends, the preferred one first; a config name that two of them have is the first's.
        changes: attributes of `Backend`, such as `lowering`; those that are not given are the first's.

    Raises:
        ConfigError: there are no bases, or `changes` names no attribute.
    """
    if not bases:
        raise ConfigError(f"Backend '{name}' is a union of nothing; give at least one backend.")
    joined: dict[str, Any] = {
        "annotators": tuple(row for base in bases for row in base.rows),
        "configs": dict(pair for base in reversed(bases) for pair in base.configs.items()),
        "transforms": tuple(dict.fromkeys(transform for base in bases for transform in base.transforms)),
        "dtypes": (),
    }
    default = next(iter(bases[0].configs))
    joined["configs"] = {default: bases[0].configs[default], **joined["configs"]}
    return derive(replace(bases[0], **joined), name, **changes)


def _without(annotator: Annotator, labels: tuple[str, ...]) -> Annotator:
    return replace(annotator, patterns=tuple(pair for pair in annotator.patterns if pair[0] not in labels))
