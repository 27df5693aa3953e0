"""Peak of resident memory, and time, of quantizing a language model and lowering it to XNNPACK.

    python benchmarks/llm_memory.py --model CHECKPOINT
    python benchmarks/llm_memory.py --layers 20 [--hidden 2048] [--vocabulary 32000] [--dtype float32]

The second takes a Llama of random weights, which it writes to the folder of temporary files first. Resident is what
Linux counts as this process's: memory of its own, and the pages of mapped files that it has at that moment. The
libraries are what is resident when all of them are imported, before the checkpoint is read. The last line is JSON.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import stored
import torch
from memory import resident
from vision import torchvision_models

import quantplug
from quantplug.core.peers.glibc import give_back

SHARD = 2**30


def random_llama(folder: Path, layers: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Writes a Llama of random weights as shards of a gigabyte, and a tokenizer of a few tokens."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    known = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=known, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    torch.manual_seed(0)
    shards: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    for name, weight in state.items():
        held[name] = (torch.ones(weight.shape) if weight.dim() == 1 else torch.randn(weight.shape) * 0.02).to(dtype)
        if sum(tensor.nbytes for tensor in held.values()) >= SHARD or name == list(state)[-1]:
            file = f"model-{len(set(shards.values()))}.safetensors"
            save_file(held, folder / file, metadata={"format": "pt"})
            shards |= dict.fromkeys(held, file)
            held = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def measure(model: Path, context: int) -> dict[str, float]:
    """Returns MB, seconds and decibels of a checkpoint's way to a `.pte`."""
    import executorch.backends.xnnpack.utils.configs
    import executorch.exir
    import executorch.extension.llm.custom_ops.custom_ops
    import executorch.runtime  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    libraries, began, computed = resident("VmRSS"), time.perf_counter(), time.process_time()
    checkpoint = quantplug.load_checkpoint(model)
    weights, read = checkpoint.nbytes / 2**20, time.perf_counter()
    artefact = quantplug.quantize_language_model(checkpoint.model, "xnnpack", keep=False, context=context)
    done, peak = time.perf_counter(), resident("VmHWM")
    return {
        "weights": weights,
        "libraries": libraries,
        "peak": peak,
        "times_weights": peak / weights,
        "above_libraries": peak - libraries,
        "above_libraries_times_weights": (peak - libraries) / weights,
        "file": artefact.nbytes / 2**20,
        "seconds_to_read": read - began,
        "seconds_to_quantize": done - read,
        "seconds_of_processor": time.process_time() - computed,
    }


def main() -> None:
    """Measures a checkpoint or a random one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with safetensors or a GGUF file")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--context", type=int, default=512)
    stored.add_option(parser)
    arguments = parser.parse_args()
    torchvision_models()
    folder = Path(tempfile.mkdtemp(prefix="llama-"))
    try:
        if arguments.model is None:
            dtype = getattr(torch, arguments.dtype)
            random_llama(folder, arguments.layers, arguments.hidden, arguments.vocabulary, dtype)
        found = measure(arguments.model or folder, arguments.context)
    finally:
        shutil.rmtree(folder)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))
    name = (
        f"Llama, {arguments.layers} layers of {arguments.hidden}" if arguments.model is None else arguments.model.stem
    )
    stored.store(arguments.store, [{"checkpoint": name, **shown(found)}], ["checkpoint"])


def shown(found: dict[str, float]) -> dict[str, str]:
    """Returns what the documents show."""
    return {
        "weights": f"{found['weights']:.0f}",
        "libraries": f"{found['libraries']:.0f}",
        "peak": f"{found['peak']:.0f}",
        "peak / weights": f"{found['times_weights']:.2f}",
        "above the libraries": f"{found['above_libraries']:.0f}",
        "`.pte`": f"{found['file']:.0f}",
        "s of processor": f"{found['seconds_of_processor']:.0f}",
    }


if __name__ == "__main__":
    main()
