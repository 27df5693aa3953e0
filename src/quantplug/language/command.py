"""What `quantplug llm` and `quantplug generate` do: from a checkpoint to a file with its figures, from a file to text.

Before: paths and options. After: a file that appears whole or not at all and a table; or text, piece by piece.
"""

import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from quantplug.algorithms.recipe import recipe_of
from quantplug.core.errors import ArtefactError, CalibrationError, ConfigError
from quantplug.core.files.whole import kind_at, require_writable
from quantplug.files import require_apart
from quantplug.language.artefact import LanguageArtefact, load_language_model
from quantplug.language.checkpoint import Checkpoint, load_checkpoint, load_tokenizer
from quantplug.language.decoder import PLAIN, require_attention, require_cache
from quantplug.language.flow import STEP, config_of, quantize_language_model, table_of
from quantplug.language.measure import perplexity, speed
from quantplug.language.weights import weights_let_go

SUFFIXES = {"xnnpack": ".pte", "x86": ".pt2"}
# Of the text, behind what calibrates.
HELD_BACK = 0.25
# A weight of 4 bits among ones of 32: no file is smaller.
SMALLEST = 1 / 8


@dataclass(frozen=True)
class Order:
    """What `quantplug llm` was asked for; see there."""

    model: Path
    out: Path
    backend: str
    config: str | None
    table: str | None
    cache: str
    attention: str | None
    recipe: str | None
    calibration: Path | None
    context: int
    limit: int | None
    score: int
    progress: bool


@dataclass(frozen=True)
class Figures:
    """What was measured of a language model; None where it was not.

    Attributes:
        perplexity_float: of the float model, on the text that was held back.
        perplexity: of the artefact, on the same text.
        bytes: of the file.
        share: of the weights in float32.
        prompt: tokens of the prompt that was read for speed.
        prefill: tokens a second of it.
        decoded: tokens that were generated for speed.
        decode: tokens a second of them.
        peak: the most bytes that the process had resident.
        peak_share: the same, times the weights in float32.
        applied: what each algorithm of the recipe did, in a sentence.
    """

    perplexity_float: float | None
    perplexity: float | None
    bytes: int
    share: float
    prompt: int
    prefill: float
    decoded: int
    decode: float
    peak: int | None
    peak_share: float | None
    applied: tuple[str, ...]

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields the rows of the table."""
        if self.perplexity is not None:
            yield "perplexity, float", f"{self.perplexity_float:.2f}"
            yield "perplexity, artefact", f"{self.perplexity:.2f}"
        yield "size", f"{self.bytes / 1e6:.2f} MB, {self.share:.1%} of the weights in float32"
        yield f"prefill of {self.prompt} tokens", f"{self.prefill:.1f} tokens/s"
        yield f"decode of {self.decoded} tokens", f"{self.decode:.1f} tokens/s"
        if self.peak is not None:
            times = f"{self.peak_share:.1f} x the weights in float32"
            yield "peak memory of this process", f"{self.peak / 1e6:.0f} MB, {times}"


def convert(order: Order, console: Console) -> Figures:
    """Quantizes a checkpoint into a file, prints what came of it and returns it.

    Raises:
        QuantplugError: names, files or the text do not fit, or a step fails.
    """
    chosen = _required(order)
    with _step(console, f"read {order.model}"):
        checkpoint = load_checkpoint(order.model)
        calibrating, scored = _texts(order, checkpoint)
    whole = checkpoint.nbytes
    _require_space(order.out, whole)
    expected = perplexed = None
    if scored:
        what = f"score the float model on {_tokens(scored)} tokens"
        with _step(console, what), weights_let_go(checkpoint.model):
            expected = perplexity(checkpoint.model, scored, progress=order.progress)
    with _step(console, f"quantize with {chosen} and lower to {order.backend}"):
        artefact = _quantized(order, checkpoint, chosen, calibrating)
    applied = () if artefact.made is None else tuple(map(str, artefact.made.applied))
    for done in applied:
        console.print(escape(done), soft_wrap=True)
    with _step(console, f"write {order.out}"):
        artefact.save(order.out)
    if scored:
        with _step(console, f"score the artefact on {_tokens(scored)} tokens, one by one"):
            perplexed = perplexity(artefact, scored, progress=order.progress)
    figures = _measured(order.out, artefact, whole, (expected, perplexed), applied)
    console.print(_table(figures.rows()))
    console.print(escape(f"Wrote {order.out}."), soft_wrap=True)
    return figures


def _required(order: Order) -> str:
    """Returns the config after a look at everything that can be refused before the work begins."""
    chosen = config_of(order.backend, order.config)
    table_of(order.backend, chosen, order.table)
    require_cache(order.cache)
    require_attention(order.attention or PLAIN, order.cache)
    recipe_of(order.recipe or ())
    require_apart((order.model, order.calibration), (order.out,))
    require_writable(order.out)
    suffix = SUFFIXES.get(order.backend)
    if suffix is None:
        raise ConfigError(f"Backend '{order.backend}' writes no language models; choose one of {sorted(SUFFIXES)}.")
    if order.out.suffix != suffix:
        raise ArtefactError(f"'{order.out}' is for backend '{order.backend}'; end its name in {suffix}.")
    if order.recipe and order.calibration is None:
        raise ConfigError(f"Recipe '{order.recipe}' needs data; pass --calibration TEXT.")
    return str(chosen)


def _require_space(out: Path, whole: int) -> None:
    free, least = shutil.disk_usage(out.absolute().parent).free, int(whole * SMALLEST)
    if free < least:
        raise ArtefactError(
            f"'{out}' will take {least / 1e6:.1f} MB or more, and there are {free / 1e6:.1f} MB; free or change its "
            "place."
        )


def _texts(order: Order, checkpoint: Checkpoint) -> tuple[list[Tensor] | None, list[Tensor]]:
    """Returns ids to calibrate with and ids to score, which lie behind them in the text."""
    if order.calibration is None:
        return None, []
    if kind_at(order.calibration) != "file":
        raise ArtefactError(f"There is no file '{order.calibration}'; pass a text.")
    try:
        text = order.calibration.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"'{order.calibration}' is no text in UTF-8 ({error.reason}); pass one.") from error
    ids = checkpoint.tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids
    length = min(STEP, order.context)
    pieces = [ids[:, i : i + length] for i in range(0, ids.shape[1] - length + 1, length)]
    held = max(1, int(len(pieces) * HELD_BACK))
    if len(pieces) < 2:
        raise CalibrationError(
            f"'{order.calibration}' has {ids.shape[1]} tokens, and calibration and score take {2 * length} or more; "
            "pass a longer text."
        )
    vocabulary = checkpoint.model.config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
    if int(ids.max()) >= vocabulary:
        token = checkpoint.tokenizer.convert_ids_to_tokens(int(ids.max()))
        raise CalibrationError(f"'{order.calibration}' has '{token}', which is no token of the model; leave it out.")
    return pieces[:-held], pieces[-held:][: order.score]


def _quantized(order: Order, checkpoint: Checkpoint, config: str, texts: list[Tensor] | None) -> LanguageArtefact:
    begin = checkpoint.tokenizer.bos_token_id
    return quantize_language_model(
        checkpoint.model,
        order.backend,
        config,
        table=order.table,
        cache=order.cache,
        attention=order.attention,
        context=order.context,
        calibration=texts,
        recipe=order.recipe or (),
        limit=order.limit,
        progress=order.progress,
        begin=begin,
        ends=checkpoint.ends,
        keep=False,
    )


def _tokens(texts: Iterable[Tensor]) -> int:
    return sum(ids.shape[1] for ids in texts)


def _measured(
    out: Path,
    artefact: LanguageArtefact,
    whole: int,
    scores: tuple[float | None, float | None],
    applied: tuple[str, ...],
) -> Figures:
    size, found, peak = out.stat().st_size, speed(artefact), _peak()
    return Figures(
        *scores,
        bytes=size,
        share=size / whole,
        prompt=found.prompt,
        prefill=found.prefill,
        decoded=found.decoded,
        decode=found.decode,
        peak=peak,
        peak_share=None if peak is None else peak / whole,
        applied=applied,
    )


def _peak() -> int | None:
    """Returns the most bytes that the process had resident, where the system tells."""
    try:
        import resource
    except ImportError:
        return None
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


@contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    """Says what is done, and how long it took."""
    console.print(escape(f"{what} ..."), soft_wrap=True)
    began = time.perf_counter()
    yield
    console.print(f"    {time.perf_counter() - began:.1f} s", highlight=False)


def talk(
    model: Path, tokenizer: Path, prompt: str, most: int | None, temperature: float, seed: int | None
) -> Iterator[str]:
    """Yields the text behind a prompt, as soon as its characters are whole.

    Raises:
        QuantplugError: a file is none, the tokenizer does not fit, or the prompt is longer than the cache.
    """
    artefact = load_language_model(model)
    reader = load_tokenizer(tokenizer, artefact.facts.vocabulary)
    ids = reader(prompt).input_ids
    room = artefact.facts.context - len(ids) + 1
    wanted = most if most is None or room < 1 else min(most, room)
    return _text(reader, artefact.generate(ids, wanted, temperature=temperature, seed=seed))


def _text(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    seen: list[int] = []
    shown = ""
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character of several tokens
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(seen, skip_special_tokens=True)[len(shown) :]
