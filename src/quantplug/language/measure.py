"""How well and how fast a language model runs.

Before: a float model or an artefact, and texts as ids. After: perplexity, tokens a second.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantplug.core.calibration.progress import progress_bar
from quantplug.core.errors import CalibrationError
from quantplug.language.artefact import LanguageArtefact


def _logits(model: LanguageArtefact | nn.Module, ids: Tensor) -> Tensor:
    """Returns the logits behind each token but the last."""
    if isinstance(model, LanguageArtefact):
        return torch.stack([model.logits([token], start) for start, token in enumerate(ids[0].tolist()[:-1])])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return logits


def perplexity(model: LanguageArtefact | nn.Module, texts: Iterable[Tensor], *, progress: bool = False) -> float:
    """Returns exp of the mean cross entropy of the tokens of texts.

    A model of transformers reads each text at once; an artefact is fed one token after the other, as when it decodes.

    Args:
        model: a model of transformers, or an artefact.
        texts: ids [1, n] with n of at least 2.
        progress: whether a bar is shown on a terminal.

    Raises:
        CalibrationError: there is no text with two tokens.
    """
    pieces = [ids for ids in texts if ids.shape[1] > 1]
    if not pieces:
        raise CalibrationError("There is no text of two tokens or more to score; give a longer one.")
    total, count = 0.0, 0
    with torch.no_grad(), progress_bar(progress, len(pieces), "score", "texts") as advance:
        for ids in pieces:
            logits = _logits(model, ids)
            total += float(F.cross_entropy(logits.float(), ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
            advance()
    return math.exp(total / count)


@dataclass(frozen=True)
class Speed:
    """Tokens a second.

    Attributes:
        prefill: of a prompt.
        decode: one by one behind it.
        prompt: tokens of the prompt.
        decoded: tokens behind it.
    """

    prefill: float
    decode: float
    prompt: int
    decoded: int


def speed(artefact: LanguageArtefact, prompt: int = 64, tokens: int = 32) -> Speed:
    """Measures an artefact; a shorter cache takes less of both. The best of three calls counts.

    Args:
        artefact: the model.
        prompt: tokens to read at once.
        tokens: tokens to decode behind it.
    """
    context = artefact.facts.context
    prompt = min(prompt, context // 2)
    tokens = min(tokens, context - prompt)
    ids = [number % artefact.facts.vocabulary for number in range(prompt)]
    reading, writing = math.inf, math.inf
    for _ in range(3):
        began = time.perf_counter()
        artefact.logits(ids, 0)
        read = time.perf_counter()
        for number in range(tokens):
            artefact.logits([1], prompt + number)
        reading, writing = min(reading, read - began), min(writing, time.perf_counter() - read)
    return Speed(prompt / reading, tokens / writing, prompt, tokens)
