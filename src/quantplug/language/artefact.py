"""A lowered language model that generates tokens.

Before: a program over a cache and what it says about itself, or its file. After: tokens, one after the other.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantplug.core.errors import ArtefactError, ConfigError, LoweringError, shown
from quantplug.core.files.whole import kind_at, write_content, write_whole
from quantplug.language.facts import Facts
from quantplug.lowering.program import Program

if TYPE_CHECKING:
    from quantplug.flow import Artefact


@dataclass(frozen=True)
class LanguageArtefact:
    """A language model that runs.

    Attributes:
        program: the decoder in its runtime: tokens [1, n] and the position of the first one [1] give logits
            [1, vocabulary].
        facts: its limits and special tokens.
        made: the artefact with reference and report; None for one that was loaded.
    """

    program: Program
    facts: Facts
    made: "Artefact | None" = None
    _turns: list[object] = field(default_factory=list, repr=False)

    def generate(
        self,
        ids: Iterable[int] | Tensor,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        stop: Collection[int] | None = None,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Yields the tokens behind a prompt, each as soon as it is known; every call begins a new text.

        Args:
            ids: the prompt's tokens, as numbers or as a tensor [n] or [1, n].
            max_new_tokens: how many at most; as many as the cache holds by default.
            temperature: 0 takes the most likely token, more draws from the probabilities.
            stop: ids that end the text and are not yielded; those of the file by default.
            seed: of what is drawn; another one at each call by default.

        Raises:
            ConfigError: the prompt is empty, is no list of the model's tokens, or does not fit the cache with what is
                to come; a number is out of its range.
            LoweringError: another text was begun meanwhile, or logits are not finite.
        """
        prompt = self._prompt(ids)
        most = self._room(len(prompt), max_new_tokens)
        if not 0 <= temperature < float("inf"):
            raise ConfigError(f"temperature is {temperature}; pass 0 or a positive number.")
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        ends = frozenset(self.facts.ends if stop is None else stop)
        self._turns[:] = [turn := object()]
        return self._tokens(turn, prompt, most, ends, lambda logits: _drawn(logits, temperature, generator))

    def _tokens(self, turn: object, prompt: list[int], most: int, ends: frozenset[int], draw: Any) -> Iterator[int]:
        start, fed = 0, prompt
        for _ in range(most):
            if self._turns != [turn]:
                raise LoweringError("Another text was begun with this model, which has one cache; finish one first.")
            token = draw(self.logits(fed, start))
            if token in ends:
                return
            yield token
            start, fed = start + len(fed), [token]

    def logits(self, ids: Iterable[int] | Tensor, start: int) -> Tensor:
        """Returns the logits [vocabulary] behind tokens whose first one stands at a position; they go into the cache.

        Args:
            ids: the tokens, at least one, as for `generate`.
            start: the position of the first of them, from 0.

        Raises:
            ConfigError: they do not fit the cache, or are no tokens of the model.
            LoweringError: the logits are not finite.
        """
        tokens = _listed(ids)
        if not tokens or start < 0 or start + len(tokens) > self.facts.context:
            raise ConfigError(
                f"{len(tokens)} tokens from position {start} on do not fit the cache of {self.facts.context}; begin "
                "earlier."
            )
        self._require_tokens(tokens)
        found = torch.empty(0)
        for first in range(0, len(tokens), self.facts.step):
            part = tokens[first : first + self.facts.step]
            found = self.program(torch.tensor([part]), torch.tensor([start + first]))[0]
        if not bool(torch.isfinite(found).all()):
            self.reset()
            raise LoweringError(f"Logits at position {start} are not finite; the weights or the config lose too much.")
        return found

    def reset(self) -> None:
        """Empties the cache. Texts need it not: each begins at position 0 and sees nothing behind itself."""
        self._turns.clear()
        self.program.restart()

    def save(self, path: str | Path) -> Path:
        """Writes the model (a `.pte` for XNNPACK, a `.pt2` for x86), whole or not at all, and returns the path.

        Raises:
            ArtefactError: the folder does not exist, or the file cannot be written.
        """
        return write_whole(Path(path), self.program.save)

    @property
    def nbytes(self) -> int:
        """Size of the saved model in bytes."""
        return self.program.nbytes

    def _prompt(self, ids: Iterable[int] | Tensor) -> list[int]:
        prompt = _listed(ids)
        if not prompt:
            raise ConfigError("The prompt is empty; begin with a token, such as the tokenizer's first.")
        self._require_tokens(prompt)
        return prompt

    def _require_tokens(self, ids: list[Any]) -> None:
        most = self.facts.vocabulary
        wrong = next((i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < most), None)
        if wrong is not None:
            raise ConfigError(
                f"The prompt has {shown(repr(wrong))}, which is no token of 0..{most - 1}; use the model's tokenizer."
            )

    def _room(self, length: int, wanted: int | None) -> int:
        context = self.facts.context
        room = context - length + 1  # the last token is not fed
        if room < 1:
            raise ConfigError(
                f"The prompt has {length} tokens, and the cache holds {context}; shorten it, or lower the model with a "
                "larger context."
            )
        if wanted is not None and not 1 <= wanted <= room:
            raise ConfigError(
                f"max_new_tokens is {wanted}, and behind {length} tokens the cache of {context} has room for 1 to "
                f"{room}; ask for fewer, or lower the model with a larger context."
            )
        return wanted or room


def _listed(ids: Iterable[int] | Tensor) -> list[Any]:
    """Returns tokens as a list, whatever is in it: of a tensor [1, n] its row."""
    if isinstance(ids, Tensor):
        ids = (ids[0] if ids.dim() == 2 and len(ids) == 1 else ids).tolist()
    return list(ids) if isinstance(ids, Iterable) else [ids]


def _drawn(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    chances = torch.softmax((logits - logits.max()) / temperature, -1)
    return int(torch.multinomial(chances, 1, generator=generator))


class _File(Program):
    """A `.pte` that was read: what it was lowered from is not known."""

    ops = ()

    def __init__(self, content: bytes) -> None:
        from quantplug.lowering.xnnpack.runtime import Method

        self._method = Method(content)

    def __call__(self, *inputs: Any, **_: Any) -> Any:
        return self._method(list(inputs))[0]

    def restart(self) -> None:
        self._method = type(self._method)(self._method.buffer)

    def save(self, path: str | Path) -> Path:
        return write_content(path, self._method.buffer)

    @property
    def nbytes(self) -> int:
        return len(self._method.buffer)


def load_language_model(path: str | Path) -> LanguageArtefact:
    """Returns a model that `LanguageArtefact.save` wrote; a `.pt2` runs on x86, any other file in ExecuTorch.

    Args:
        path: the `.pte` or `.pt2` file.

    Raises:
        ArtefactError: the file is missing, or holds no language model.
    """
    path = Path(path)
    if kind_at(path) != "file":
        raise ArtefactError(f"There is no file '{path}'; pass a model that `quantplug llm` wrote.")
    if path.suffix == ".pt2":
        from quantplug.lowering.x86 import X86Program

        program = X86Program.load(path)
        return LanguageArtefact(program, Facts.of_constants(program.constants, str(path)))
    from quantplug.lowering.xnnpack.runtime import constants_of

    content = path.read_bytes()
    try:
        constants = constants_of(content)
        return LanguageArtefact(_File(content), Facts.of_constants(constants, str(path)))
    except LoweringError as error:
        raise ArtefactError(
            f"'{path}' is no program that runs here ({str(error).rstrip('.')}); write it again."
        ) from error
