"""From a causal model to an artefact that generates: export over a cache, quantize, lower, with what the file tells.

Before: a model of transformers. After: a `LanguageArtefact`.
"""

from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from quantplug.algorithms.recipe import Algorithm
from quantplug.core.errors import CalibrationError, ConfigError, ModelError, first_line
from quantplug.core.peers.glibc import give_back
from quantplug.core.report.explain import explain
from quantplug.flow import Artefact, Converted, Request, converted, export, lowered
from quantplug.language.artefact import LanguageArtefact
from quantplug.language.decoder import (
    BY_BACKEND,
    PLAIN,
    Decoder,
    needs_mask,
    objection,
    require_attention,
    require_cache,
)
from quantplug.language.facts import Facts
from quantplug.language.head import read_each_token, read_last_token
from quantplug.quantizers.framework.registry import get_quantizer

# The first of these that a backend has is what it runs language models in.
PREFERRED = ("8da4w", "int8_dynamic")
FLOAT = "float32"
# Configs for tables of embeddings, and the one that goes by itself with layers in groups.
IN_GROUPS = ("int4_groups", "int8_groups")
TABLES = (*IN_GROUPS, "int8_weight_only")
TABLE_BESIDE = {"int4_dynamic_groups": "int4_groups"}
# Groups of tables: fewer scales are lost among the integers, more follow them closer.
WIDEST = 192
# What a call takes at most by itself: the runtime plans its memory for so many tokens.
STEP = 128
# The option of a lowering by which programs say what they are.
_SAID = ("constants",)


def config_of(backend: str, config: str | None) -> str | None:
    """Returns the name of a config for language models; None stands for the backend's own default.

    Raises:
        ConfigError: there is no such backend or config, or its programs are none of language models.
    """
    declared = get_quantizer(backend).backend
    try:
        declared.require_lowering_options(_SAID)
    except ConfigError as error:
        raise ConfigError(
            f"Backend '{backend}' writes no language models; choose one of {sorted(BY_BACKEND)}."
        ) from error
    known = {*declared.configs, *declared.aliases}
    chosen = config or next((name for name in PREFERRED if name in known), None)
    if chosen != FLOAT:
        declared.config(chosen)
    return chosen


def table_of(backend: str, config: str | None, table: str | None) -> str:
    """Returns the name of the config for tables of embeddings, "float32" for none.

    Args:
        backend: that runs them.
        config: of the layers, as `config_of` returned it.
        table: what was asked for; None for what goes with the config.

    Raises:
        ConfigError: the backend has no such tables.
    """
    declared = get_quantizer(backend).backend
    if table is None:
        return TABLE_BESIDE.get(declared.aliases.get(config or "", config or ""), FLOAT)
    known = [FLOAT, *(name for name in TABLES if name in declared.configs)]
    if table not in known:
        raise ConfigError(f"Backend '{backend}' has no tables of embeddings in '{table}'; choose one of {known}.")
    return table


def attention_of(backend: str, model: nn.Module, context: int, cache: str, attention: str | None) -> str:
    """Returns how a model attends to its cache.

    Args:
        backend: that runs it.
        model: of transformers.
        context: positions of the cache.
        cache: what it holds.
        attention: what was asked for; None for what the backend is fastest with.

    Raises:
        ConfigError: there is no such cache or attention, or the backend has no operator for it.
        ModelError: the model computes another attention than what was asked for.
    """
    require_cache(cache)
    require_attention(attention or PLAIN, cache)
    operator = BY_BACKEND.get(backend)
    if attention not in (None, PLAIN, operator):
        raise ConfigError(f"Backend '{backend}' has no operator for attention '{attention}'; leave it out.")
    if attention == PLAIN or operator is None or cache != "float32":
        return PLAIN
    reason = objection(model, context, operator)
    if reason is not None and attention is not None:
        raise ModelError(
            f"{type(model).__name__} cannot have attention '{attention}': {reason}; leave it out for the model's own."
        )
    return PLAIN if reason else operator


def quantize_language_model(
    model: nn.Module,
    backend: str = "xnnpack",
    config: str | None = None,
    *,
    table: str | None = None,
    cache: str = "float32",
    attention: str | None = None,
    context: int = 512,
    step: int | None = None,
    calibration: Iterable[Tensor] | None = None,
    recipe: str | Sequence[Algorithm] = (),
    limit: int | None = None,
    progress: bool = True,
    begin: int | None = None,
    ends: Sequence[int] = (),
    keep: bool = True,
    **lowering: Any,
) -> LanguageArtefact:
    """Quantizes a causal language model and lowers it with its cache.

    Args:
        model: of transformers, such as `LlamaForCausalLM` in float32; it is not changed, unless `keep` is false.
        backend: "xnnpack" or "x86".
        config: of the backend, or "float32" for none; by default "8da4w" or "int8_dynamic", what the backend has.
        table: config of the tables of embeddings, "float32" for none; by default 4 bits in groups beside "8da4w".
        cache: of keys and values, "float32", or "int8" with a scale for each head and position.
        attention: "aten" for the model's own over all positions, "executorch" on xnnpack (ExecuTorch's operator) and
            "filled" on x86 for one that stops at the last position that is filled; by default that where model and
            cache suit it.
        context: positions of the cache.
        step: tokens that a call takes at most, 128 or the context by default.
        calibration: ids [1, n] of texts, each no longer than a step, for static configs and for recipes.
        recipe: as for `quantplug.quantize`.
        limit: at most so many of the texts.
        progress: whether bars are shown on a terminal.
        begin: the tokenizer's first id, which is written into the file.
        ends: ids that end a text, by default those of the model's own configuration.
        keep: whether the model keeps its weights; False moves it to the device "meta" when they are quantized, and
            their memory is free before the rest begins. With "float32" none are, and the model stays.
        lowering: options of the backend's lowering.

    Raises:
        ConfigError: unknown backend, config, table, cache or attention, or a step that is none.
        ModelError: the model is none of transformers' causal ones, has fewer positions than the context, or its
            attention is another one than what was asked for.
        CalibrationError: ids of the wrong shape or beyond the vocabulary.
        LoweringError: the backend cannot run the result.
    """
    chosen = config_of(backend, config)
    rows = table_of(backend, chosen, table)
    require_cache(cache)
    is_masked = needs_mask(model, context)
    chosen_attention = attention_of(backend, model, context, cache, attention)
    decoder = Decoder(model, context, cache, chosen_attention).eval()
    decoder.gives_mask = is_masked
    facts = _facts(decoder, step, begin, ends)
    batches = None if calibration is None else _batches(calibration, facts, limit)
    lowering = {"constants": facts.constants(), **lowering}
    if chosen == FLOAT and rows == FLOAT:
        made = _in_float(_exported(decoder, facts, batches), backend, lowering)
        return LanguageArtefact(made.program, facts, made)
    quantizer = get_quantizer(backend)
    quantizer = _with_table(quantizer if chosen == FLOAT else quantizer.set_global(chosen), rows, model)
    request = Request(backend=quantizer, calibration=batches, progress=progress, recipe=recipe, lowering=lowering)
    found = _converted(request, _exported(decoder, facts, batches))
    if not keep:
        del decoder
        model.to("meta")
        give_back()
    made = lowered(request, found)
    return LanguageArtefact(made.program, facts, made)


def _with_table(quantizer: Any, rows: str, model: nn.Module) -> Any:
    """Returns a quantizer for tables too; groups are as wide as accuracy does not notice.

    SmolLM2, whose table alone has 4 bits: a perplexity of 33.9 in groups of 32, 33.7 of 96, 34.1 of 192, 35.7 of 576,
    and 32.8 in float.
    """
    if rows == FLOAT:
        return quantizer
    if rows not in IN_GROUPS:
        return quantizer.set_operator_type("embedding", rows)
    width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]  # of transformers
    size = max((size for size in range(32, WIDEST + 1, 32) if width % size == 0), default=32)
    return quantizer.set_operator_type("embedding", quantizer.backend.config(rows, group_size=size))


def _facts(decoder: Decoder, step: int | None, begin: int | None, ends: Sequence[int]) -> Facts:
    most = min(STEP, decoder.context) if step is None else step
    if not 2 <= most <= decoder.context:
        raise ConfigError(f"step is {most} and the context {decoder.context}; give 2 to {decoder.context}.")
    config = decoder.model.config.get_text_config()  # type: ignore[union-attr,operator]  # of transformers
    own = config.eos_token_id
    known = ends or (own if isinstance(own, list | tuple) else () if own is None else (own,))
    first = config.bos_token_id if begin is None else begin
    limits = (decoder.context, most, config.vocab_size, decoder.layers)
    return Facts(*limits, first, tuple(known), decoder.attends_to_rows)


def _exported(
    decoder: Decoder, facts: Facts, batches: list[tuple[Tensor, Tensor]] | None
) -> torch.export.ExportedProgram:
    """Returns the decoder for any number of tokens; its examples, with which programs are proved, are of the texts."""
    count = torch.export.Dim("count", min=1, max=facts.step)
    spread = torch.arange(1, min(17, facts.step + 1))[None] * 7 % facts.vocabulary
    longer = (batch for batch in batches or () if batch[0].shape[1] > 1)
    examples = next(longer, (spread, torch.zeros(1, dtype=torch.int64)))
    shapes = {"tokens": {1: count}, "start": None}
    errors = []
    for gives_mask in sorted({decoder.gives_mask, True}):
        decoder.gives_mask = gives_mask
        # torch prints graphs that it gives up.
        with torch.no_grad(), redirect_stderr(StringIO()):
            try:
                return torch.export.export(decoder, examples, dynamic_shapes=shapes)
            except Exception as error:  # whatever the code of a model makes of open sizes
                errors.append(error)
    name, reason = type(decoder.model).__name__, first_line(errors[-1]).rstrip(".")
    raise ModelError(f"torch.export fails on {name} over a cache ({reason}); pass another model.") from errors[-1]


def _converted(request: Request, exported: torch.export.ExportedProgram) -> Converted:
    """Returns the q/dq graph of a decoder, whose head has learned from each token of the texts."""
    if request.calibration is None:
        return converted(request, exported)
    graph = export(exported, ())
    head = read_each_token(graph)
    found = converted(request, graph, (exported.example_inputs or ((), {}))[0])
    read_last_token(found.reference, head)
    return found


def _in_float(exported: torch.export.ExportedProgram, backend: str, lowering: dict[str, Any]) -> Artefact:
    module = export(exported, ())
    args, _ = exported.example_inputs or ((), {})
    program = get_quantizer(backend).backend.lower(module, args, **lowering)
    return Artefact(program, module, explain(module), backend)


def _batches(texts: Iterable[Tensor], facts: Facts, limit: int | None) -> list[tuple[Tensor, Tensor]]:
    found = []
    for number, ids in enumerate(texts):
        if number == limit:
            break
        fits = isinstance(ids, Tensor) and ids.dim() == 2 and len(ids) == 1 and 1 <= ids.shape[1] <= facts.step
        if not fits or ids.dtype != torch.int64:
            shown = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise CalibrationError(f"Text {number} is {shown}; pass int64 ids [1, n] with n from 1 to {facts.step}.")
        if int(ids.min()) < 0 or int(ids.max()) >= facts.vocabulary:
            raise CalibrationError(
                f"Text {number} has an id outside of 0..{facts.vocabulary - 1}; use the model's tokenizer."
            )
        found.append((ids, torch.zeros(1, dtype=torch.int64)))
    return found
