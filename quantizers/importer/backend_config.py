"""torch.ao's `BackendConfig`, or a dictionary of the RFC, as a `Backend` of ours.

Before: configs of patterns of modules, functions and tensor methods. After: a backend with one rule for each
different piece of an exported graph; a module and its function are one operator there, and so one rule.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from quantplug.annotators.presets import config_for
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.errors import ConfigError
from quantplug.core.graph.operators import operator_overloads
from quantplug.core.specs.dtypes import DTypeConfig
from quantplug.quantizers.framework.backend import Backend, Lowering
from quantplug.quantizers.importer.dtypes import distinct_names, dtype_config, is_fixed
from quantplug.quantizers.importer.entries import PatternEntry, pattern_entry, require_keys
from quantplug.quantizers.importer.operator_dictionary import operator_entries
from quantplug.quantizers.importer.operators import RESIDUAL, NotApplicableError, sequence
from quantplug.quantizers.importer.report import Effects, ImportedPattern, ImportReport, effects
from quantplug.quantizers.importer.rules import fusion_only, label_of, rules

REFERENCE = "quantplug.lowering.reference:lower"


def from_backend_config(backend_config: Any, lowering: str | Lowering = REFERENCE, name: str | None = None) -> Backend:
    """Returns the backend that a `BackendConfig` declares.

    Args:
        backend_config: torch.ao's object, or a dictionary of the RFC; tuples in either order.
        lowering: as for `Backend`; by default the q/dq graph itself runs.
        name: of the backend; that of the config by default.

    Raises:
        ConfigError: a pattern or a setting is not understood, or no pattern is applicable.
    """
    return import_backend_config(backend_config, lowering, name)[0]


def import_backend_config(
    backend_config: Any, lowering: str | Lowering = REFERENCE, name: str | None = None
) -> tuple[Backend, ImportReport]:
    """Returns the backend that a `BackendConfig` declares, and what became of each pattern and setter.

    Args:
        backend_config: as for `from_backend_config`.
        lowering: as for `from_backend_config`.
        name: as for `from_backend_config`.

    Raises:
        ConfigError: a pattern or a setting is not understood, or no pattern is applicable.
    """
    own_name, found = _entries(backend_config)
    fused = _fused_modules(found)
    pieces = [_Piece.of(entry, fused) for entry in found]
    named = distinct_names([dtypes for piece in pieces for dtypes in piece.dtypes])
    by_sequence = _by_sequence(pieces)
    annotators = tuple(a for alike in by_sequence.values() for a in alike.annotators(named))
    chosen = name or own_name
    if not annotators:
        raise ConfigError(f"No pattern of backend config '{chosen}' is applicable in PT2E; it has {len(found)}.")
    backend = Backend(
        chosen,
        annotators,
        {each.name: partial(config_for, each) for each in _usable(named.values())},
        lowering,
        folds_batch_norm=_folding(pieces),
        summary=f"imported from a BackendConfig with {len(found)} patterns",
    )
    return backend, ImportReport(chosen, tuple(_told(piece, by_sequence, named) for piece in pieces))


def _entries(backend_config: Any) -> tuple[str, list[PatternEntry]]:
    """Returns the name of a `BackendConfig`, or of a dictionary, and its pattern configs."""
    if isinstance(backend_config, Mapping):
        require_keys("backend config", backend_config, ("name", "configs", "operator"))
        found = [pattern_entry(config) for config in backend_config.get("configs", ())]
        return str(backend_config.get("name", "")), [*found, *operator_entries(backend_config.get("operator", {}))]
    if not hasattr(backend_config, "configs"):
        raise ConfigError(
            f"from_backend_config takes a BackendConfig or a dictionary with 'configs' or 'operator', found "
            f"{type(backend_config).__name__}."
        )
    return backend_config.name, [pattern_entry(config) for config in backend_config.configs]


@dataclass(frozen=True)
class _Piece:
    """One pattern config: its sequence of operators, or why it has none."""

    entry: PatternEntry
    sequence: tuple[str, ...] = ()
    reason: str = ""
    dtypes: tuple[DTypeConfig, ...] = ()

    @classmethod
    def of(cls, entry: PatternEntry, fused: dict[Any, tuple[str, ...]]) -> "_Piece":
        try:
            operators = sequence(entry.items, fused, reversed_order=entry.pattern is None)
        except NotApplicableError as reason:
            return cls(entry, reason=str(reason))
        dtypes = tuple(dtype_config(found, entry.text) for found in entry.dtype_configs)
        if not dtypes and not entry.fuses:
            return cls(entry, reason="it has no dtype config, and torch.ao quantizes only what fits one")
        return cls(entry, operators, dtypes=dtypes)

    @property
    def key(self) -> tuple[str, ...]:
        """The sequence that is matched: before the sum with another tensor a batch norm is folded."""
        return tuple(name for name in self.sequence if name != "batch_norm" or RESIDUAL not in self.sequence)


@dataclass(frozen=True)
class _Alike:
    """The pattern configs of one sequence: modules, functions and what fusion makes of them."""

    sequence: tuple[str, ...]
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def quantizing(self) -> list[_Piece]:
        """The configs that say how the piece is quantized; the others only say that it is fused."""
        return [piece for piece in self.pieces if not piece.entry.fuses]

    @property
    def dtypes(self) -> tuple[DTypeConfig, ...]:
        return tuple(dict.fromkeys(dtypes for piece in self.quantizing for dtypes in piece.dtypes))

    @property
    def observation(self) -> str:
        """How the piece is observed.

        Raises:
            ConfigError: its configs do not agree.
        """
        found = {piece.entry.observation(): piece.entry.text for piece in self.quantizing}
        if len(found) > 1:
            raise ConfigError(
                f"The patterns {' and '.join(found.values())} are one piece '{label_of(self.sequence)}' in an exported "
                f"graph, but are observed in different ways, {' and '.join(map(repr, found))}; give both the same."
            )
        return next(iter(found), "none")

    def annotators(self, named: dict[DTypeConfig, DTypeConfig]) -> list[Annotator]:
        if not self.quantizing:
            return [fusion_only(self.sequence)]
        return rules(self.sequence, self.quantizing[0].entry, self.observation, tuple(named[d] for d in self.dtypes))


def _fused_modules(found: list[PatternEntry]) -> dict[Any, tuple[str, ...]]:
    """Returns what fused modules of the backend's own are made of; a pattern of such a module means its parts."""
    made: dict[Any, tuple[str, ...]] = {}
    for entry in found:
        if entry.fused_module is not None and not getattr(entry.fused_module, "__module__", "").startswith("torch."):
            with suppress(NotApplicableError):
                made[entry.fused_module] = sequence(entry.items, made, reversed_order=entry.pattern is None)
    return made


def _by_sequence(pieces: list[_Piece]) -> dict[tuple[str, ...], _Alike]:
    found: dict[tuple[str, ...], _Alike] = {}
    for piece in pieces:
        if piece.sequence:
            found.setdefault(piece.key, _Alike(piece.key)).pieces.append(piece)
    return found


def _told(
    piece: _Piece, by_sequence: dict[tuple[str, ...], _Alike], named: dict[DTypeConfig, DTypeConfig]
) -> ImportedPattern:
    if not piece.sequence:
        return ImportedPattern(piece.entry.text, reason=piece.reason)
    rule = label_of(piece.key)
    used = not piece.entry.fuses
    dtypes = (f"dtype config {named[d]}" if used else "those of the fused module count" for d in piece.dtypes)
    told: Effects = tuple(("add_dtype_config", effect) for effect in dict.fromkeys(dtypes))
    return ImportedPattern(
        piece.entry.text, rule, effects=effects(piece.entry, rule, by_sequence[piece.key].observation, told)
    )


def _usable(dtypes: Iterable[DTypeConfig]) -> list[DTypeConfig]:
    """Returns the dtype configs that a whole model can be quantized to, those with weights if there are any.

    Fixed qparams are those of one operator; they are left where there is nothing else.
    """
    every = list(dtypes)
    free = [found for found in every if not is_fixed(found)]
    return [found for found in free if found.weight is not None] or free or every


@dataclass(frozen=True)
class FoldsAfter:
    """Lets prepare fold a batch norm into the producers that a backend config declares before one.

    Attributes:
        producers: their operators, such as "conv2d" and "convolution".
    """

    producers: frozenset[str]

    def __call__(self, producer: fx.Node, batch_norm: fx.Node) -> str | None:
        """Returns None to allow the folding, or the reason against it."""
        declared = any(producer.target in operator_overloads(name) for name in self.producers)
        return None if declared else f"the backend declares no piece of {producer.target} and a batch norm"


def _folding(pieces: list[_Piece]) -> bool | FoldsAfter:
    producers = {piece.sequence[0] for piece in pieces if "batch_norm" in piece.sequence[1:]}
    decomposed = {"addmm", "mm"} if "linear" in producers else set()
    decomposed |= {"convolution"} if any(name.startswith("conv") for name in producers) else set()
    return FoldsAfter(frozenset(producers | decomposed)) if producers else False
