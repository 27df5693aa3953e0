"""What a file of a language model says about itself, in the names that ExecuTorch's LLM runner asks for.

Before: a model and its tokenizer, or the constants of a file. After: its limits and its special tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantplug.core.errors import ArtefactError

# As in ExecuTorch's extension/llm/runner/constants.h.
_STEP, _CONTEXT, _VOCABULARY = "get_max_seq_len", "get_max_context_len", "get_vocab_size"
_BEGIN, _ENDS, _LAYERS = "get_bos_id", "get_eos_ids", "get_n_layers"
_OPERATOR = "use_sdpa_with_kv_cache"


@dataclass(frozen=True)
class Facts:
    """What a caller needs to know of a language model.

    Attributes:
        context: positions of the cache.
        step: tokens that one call takes at most; longer prompts are read in parts.
        vocabulary: how many tokens there are.
        layers: of the model.
        begin: the id that a text begins with, None where the tokenizer has none.
        ends: ids that end a text.
        attends_to_rows: whether an operator attends to the rows of the cache that are filled.
    """

    context: int
    step: int
    vocabulary: int
    layers: int
    begin: int | None = None
    ends: tuple[int, ...] = ()
    attends_to_rows: bool = False

    def constants(self) -> dict[str, Any]:
        """Returns them as the constants of a file; what is not known is left out."""
        known: dict[str, Any] = {
            _STEP: self.step,
            _CONTEXT: self.context,
            _VOCABULARY: self.vocabulary,
            _LAYERS: self.layers,
            "use_kv_cache": True,
            _OPERATOR: self.attends_to_rows,
            "enable_dynamic_shape": True,
        }
        begin = {} if self.begin is None else {_BEGIN: self.begin}
        return known | begin | ({_ENDS: list(self.ends)} if self.ends else {})

    @classmethod
    def of_constants(cls, constants: Mapping[str, Any], where: str) -> "Facts":
        """Returns what the constants of a file say.

        Raises:
            ArtefactError: they are not those of a language model.
        """
        context, step, vocabulary, layers = (
            _count(constants, name, where) for name in (_CONTEXT, _STEP, _VOCABULARY, _LAYERS)
        )
        ends = constants.get(_ENDS, ())
        every = tuple(ends) if isinstance(ends, Sequence) else (ends,)
        own = bool(constants.get(_OPERATOR))
        return cls(context, step, vocabulary, layers, constants.get(_BEGIN), every, own)


def _count(constants: Mapping[str, Any], name: str, where: str) -> Any:
    value = constants.get(name)
    if type(value) is not int or value < 1:
        raise ArtefactError(
            f"'{where}' is no language model: its '{name}' is {value!r}; pass a file that `quantplug llm` wrote."
        )
    return value
