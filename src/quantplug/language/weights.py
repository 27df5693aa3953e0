"""Weights of checkpoints that stay in files until something reads them, and go when it has.

Before: safetensors or a GGUF file. After: tensors in float32 in mapped files, by the names that transformers has for
them: the checkpoint's own file where that holds float32, else files without a name that each is expanded to.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantplug.core.files.scratch import in_scratch
from quantplug.core.peers.linux import let_go

_SIZES_OF_EXPERTS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def of_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights in the safetensors of a Hugging Face folder, one file or several with an index.

    Raises:
        OSError: a file is missing.
        ValueError: the index names a file outside of the folder.
        Exception: of safetensors, for a damaged file.
    """
    from safetensors import safe_open

    for name in _files(folder):
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # a file is no dict
                yield key, _in_single_precision(file.get_tensor(key))


def _files(folder: Path) -> list[str]:
    if (folder / _ONE).is_file() or not (folder / _INDEX).is_file():
        return [_ONE]
    names = sorted(set(json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"].values()))
    outside = next((name for name in names if Path(name).name != name), None)
    if outside is not None:
        raise ValueError(f"{_INDEX} names '{outside}', which is outside of the folder")
    return names


def take_sizes_of_experts(path: Path, config: Any) -> None:
    """Gives a configuration the sizes of experts that a GGUF file names; transformers (5.24) takes those of one model.

    Args:
        path: the file.
        config: what transformers made of it, of a mixture of experts.
    """
    from gguf import GGUFReader

    fields = GGUFReader(str(path)).fields
    architecture = fields["general.architecture"].contents()
    for key, name in _SIZES_OF_EXPERTS.items():
        found = fields.get(f"{architecture}.{key}")
        if found is not None and hasattr(config, name):
            setattr(config, name, int(found.contents()))


def of_gguf(path: Path, kind: Any, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a GGUF file, each expanded by itself, where transformers expands all of them at once.

    Args:
        path: the file.
        kind: the class of transformers that takes the weights.
        config: its configuration.

    Raises:
        Exception: of gguf or transformers, for a file that they do not know.
    """
    from gguf import GGUFReader, dequantize
    from transformers import modeling_gguf_pytorch_utils as known

    with torch.device("meta"):
        model = kind(config)
    reader = GGUFReader(str(path))
    architecture = reader.fields["general.architecture"].contents()
    processed_by = known.TENSOR_PROCESSORS.get(architecture, known.TensorProcessor)
    processor = processed_by(config=known.load_gguf_checkpoint(str(path))["config"])
    names = known.get_gguf_hf_weights_map(model, processor)
    # Some processors put several tensors together by themselves, in here.
    joined: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        found = processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": joined},
        )
        if found.name in names:
            yield names[found.name], in_scratch(torch.from_numpy(found.weights), torch.float32)
    yield from joined.items()


def _in_single_precision(weight: Tensor) -> Tensor:
    is_other = weight.is_floating_point() and weight.dtype != torch.float32
    return in_scratch(weight, torch.float32) if is_other else weight


@contextmanager
def weights_let_go(*models: nn.Module) -> Iterator[None]:
    """Lets the weights of each layer go when it has run, inside of the block, where they lie in files."""

    def after(module: nn.Module, *_: Any) -> None:
        for weight in module.parameters(recurse=False):
            let_go(weight)

    every = {module for model in models for module in model.modules()}
    handles = [module.register_forward_hook(after) for module in every]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
