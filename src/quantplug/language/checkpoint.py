"""Causal language models and their tokenizers from files on this machine, read by transformers.

Before: a folder with `config.json` and safetensors, or a GGUF file. After: a model in float32, whose weights lie in
files until something reads them, and its tokenizer; nothing is downloaded, and no code of the checkpoint runs.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantplug.core.errors import ArtefactError, ConfigError, QuantplugError, first_line, shown
from quantplug.core.files.whole import kind_at
from quantplug.core.peers.glibc import give_back
from quantplug.language.torchvision import reason_of, usable_torchvision
from quantplug.language.weights import of_folder, of_gguf, take_sizes_of_experts

# Nothing is downloaded, and nobody is asked whether code of the checkpoint may run.
_ON_THIS_MACHINE: Any = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class Checkpoint:
    """A model as it was trained.

    Attributes:
        model: of transformers, in float32 and in eval mode.
        tokenizer: of transformers.
    """

    model: nn.Module
    tokenizer: Any

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a text: the tokenizer's, and those that the model generates by its own settings."""
        settings: Any = self.model.generation_config
        own = settings.eos_token_id
        every = [self.tokenizer.eos_token_id, *(own if isinstance(own, list | tuple) else (own,))]
        return tuple(sorted({end for end in every if end is not None}))

    @property
    def nbytes(self) -> int:
        """Bytes of its weights; what several layers share counts once."""
        return sum(weight.nbytes for weight in self.model.parameters())


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Reads a causal language model and its tokenizer.

    Args:
        path: a Hugging Face folder with safetensors, or a GGUF file. Weights in float32 are read from there when they
            are needed; others are expanded to the folder of temporary files, on Linux, where they are gone with the
            model.

    Raises:
        ConfigError: transformers is not installed.
        ArtefactError: there is none, or it is damaged, is no causal model, lacks weights or a tokenizer that fits.
    """
    path = Path(path)
    where, options = _place(path)
    with _reading(path, "model"):
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

        config = AutoConfig.from_pretrained(where, **_ON_THIS_MACHINE, **options)
        _require_causal(path, config)
        _require_floats(path, config)
        if options and hasattr(config, "moe_intermediate_size"):
            take_sizes_of_experts(path, config)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        weights = dict(of_gguf(path, kind, config) if options else of_folder(path))
        model, loaded = kind.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # without, transformers prints a table and raises a sentence about it
        )
        _take_generation_settings(model, path)
    for name, found, wanted in sorted(loaded["mismatched_keys"]):
        raise ArtefactError(
            f"'{path}' has weight '{name}' of sizes {list(found)}, and {type(model).__name__} of its configuration has "
            f"{list(wanted)}; get both from one checkpoint."
        )
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise ArtefactError(
            f"'{path}' lacks weight '{missing[0]}' of {type(model).__name__}, and {len(missing) - 1} others; get the "
            "whole checkpoint."
        )
    vocabulary = config.get_text_config().vocab_size
    tokenizer = load_tokenizer(path, vocabulary)
    give_back()  # what transformers and gguf made on the way
    return Checkpoint(model.eval(), tokenizer)


def load_tokenizer(path: str | Path, vocabulary: int | None = None) -> Any:
    """Reads the tokenizer of a folder or GGUF file.

    Args:
        path: the folder or file.
        vocabulary: how many tokens the model has.

    Raises:
        ConfigError: transformers is not installed.
        ArtefactError: there is no tokenizer, or it has ids that the model does not know.
    """
    path = Path(path)
    where, options = _place(path)
    with _reading(path, "tokenizer"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(where, **_ON_THIS_MACHINE, **options)
    # transformers adds tokens to those of a file, such as an end of text, that no text of ours leads to.
    added = tokenizer.get_added_vocab().keys() - _written_tokens(path)
    largest = max((i for token, i in tokenizer.get_vocab().items() if token not in added), default=-1)
    if largest < 0:
        raise ArtefactError(f"The tokenizer of '{path}' has no tokens; put `tokenizer.json` beside the weights.")
    if vocabulary is not None and largest >= vocabulary:
        raise ArtefactError(
            f"The tokenizer of '{path}' has ids up to {largest}, and the model knows {vocabulary}; pass the tokenizer "
            "that the model was trained with."
        )
    return tokenizer


def _written_tokens(path: Path) -> set[str]:
    """Returns the tokens that a folder adds to those of its tokenizer's model by itself."""
    file = path / "tokenizer.json"
    found = json.loads(file.read_text("utf-8")).get("added_tokens", ()) if file.is_file() else ()
    return {each["content"] for each in found}


def _place(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns a folder and how transformers finds a GGUF file in it."""
    kind = kind_at(path)
    if kind == "folder":
        return str(path), {}
    if kind == "file" and path.suffix == ".gguf":
        return str(path.absolute().parent), {"gguf_file": path.name}
    if kind == "file":
        raise ArtefactError(f"'{path}' is a file of another kind; pass a GGUF file, or a folder with config.json.")
    raise ArtefactError(f"There is no checkpoint '{path}'; pass a folder with config.json, or a GGUF file.")


def _require_causal(path: Path, config: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    names = list(config.architectures or ())
    is_causal = all(name.endswith(("ForCausalLM", "LMHeadModel")) and not name.startswith("Bert") for name in names)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not is_causal or config.is_encoder_decoder:
        kind = names[0] if names else config.model_type
        raise ArtefactError(
            f"'{path}' is no causal language model but a {shown(kind)}; pass one that ends in ForCausalLM."
        )


def _require_floats(path: Path, config: Any) -> None:
    found = getattr(config, "quantization_config", None)
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
        raise ArtefactError(
            f"The weights of '{path}' are quantized already ({shown(str(method))}); pass the checkpoint in floating "
            "point that they come from, or a GGUF file."
        )


def _take_generation_settings(model: Any, path: Path) -> None:
    """Gives a model the settings that stand beside its weights, such as the tokens that end a text."""
    from transformers import GenerationConfig

    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=True)


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Keeps the notes of transformers quiet, and makes one sentence of what it raises on files of any content."""
    try:
        with usable_torchvision(), _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except QuantplugError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"Language models need transformers and its companions ({reason_of(error)}); pip install 'quantplug[llm]'."
        ) from error
    except Exception as error:  # whatever the content of files makes transformers raise
        reason = first_line(error).rstrip(".")
        raise ArtefactError(
            f"'{path}' holds no {what} that transformers reads ({reason}); get all of it again, or pass another one."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level, barred = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if barred:
            logging.enable_progress_bar()
