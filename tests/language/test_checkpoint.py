"""Checkpoints: folders and GGUF files give the model that was written, everything else one sentence."""

import json
import os
import subprocess
import sys

import pytest
import torch
from extras import transformers_module
from language_models import VOCABULARY, causal, texts, tokenizer, write_folder, write_gguf, write_mixture

import quantplug
from quantplug.core.specs.levels import sqnr


@pytest.fixture(scope="module")
def llama():
    return causal()


@pytest.fixture
def folder(tmp_path, llama):
    return write_folder(tmp_path / "model", llama)


def whole(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_checkpoint_is_the_model_that_was_written(kind, tmp_path, llama):
    path = write_folder(tmp_path / "it", llama) if kind == "folder" else write_gguf(tmp_path / "it.gguf", llama)
    found = quantplug.load_checkpoint(path)
    assert sqnr(whole(found.model, texts(20)[0]), whole(llama, texts(20)[0])) > 110
    assert found.tokenizer("bad cab").input_ids == tokenizer()("bad cab").input_ids
    assert found.nbytes == sum(weight.nbytes for weight in llama.parameters())
    assert not found.model.training


def test_a_mixture_of_experts_in_a_gguf_file(tmp_path):
    """Its experts are smaller than those of the one model whose sizes transformers knows."""
    model = causal("Qwen2Moe")
    found = quantplug.load_checkpoint(write_mixture(tmp_path / "it.gguf", model))
    assert sqnr(whole(found.model, texts(20)[0]), whole(model, texts(20)[0])) > 110


def test_a_tokenizer_that_transformers_adds_a_token_to(tmp_path):
    """That of Qwen2 gets an end of text, which no text leads to; one that the folder adds is refused."""
    model = causal("Qwen2")
    folder = write_folder(tmp_path / "model", model)
    found = quantplug.load_checkpoint(folder)
    assert len(found.tokenizer) > VOCABULARY
    reader = tokenizer()
    reader.add_tokens(["<extra>"])
    reader.save_pretrained(folder)
    with pytest.raises(quantplug.ArtefactError, match="ids up to 200, and the model knows 200; pass the tokenizer"):
        quantplug.load_checkpoint(folder)


def described_as(folder, **changes):
    """Changes a folder's configuration and returns the folder."""
    described = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def test_weights_that_are_quantized_already(folder):
    path = described_as(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.raises(
        quantplug.ArtefactError, match=r"are quantized already \(gptq\); pass the checkpoint in floating"
    ):
        quantplug.load_checkpoint(path)


def test_weights_of_other_sizes_than_the_configuration_says(folder, capfd):
    said = r"has weight 'model\.layers\.0\.mlp\.down_proj\.weight' of sizes \[64, 128\], and .* has \[64, 96\]; get"
    with pytest.raises(quantplug.ArtefactError, match=said):
        quantplug.load_checkpoint(described_as(folder, intermediate_size=96))
    assert "MISMATCH" not in "".join(capfd.readouterr())


def test_ends_are_the_tokenizers_and_the_models(tmp_path):
    model = causal(num_hidden_layers=1)
    model.generation_config.eos_token_id = [7, 5]
    assert quantplug.load_checkpoint(write_folder(tmp_path, model)).ends == (2, 5, 7)


def test_a_folder_without_a_tokenizer(tmp_path, llama):
    with pytest.raises(quantplug.ArtefactError, match=r"holds no tokenizer|has no tokens"):
        quantplug.load_checkpoint(write_folder(tmp_path, llama, with_tokenizer=False))


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path):
    with pytest.raises(quantplug.ArtefactError, match="ids up to 199, and the model knows 64; pass the tokenizer"):
        quantplug.load_checkpoint(write_folder(tmp_path, causal(vocab_size=64)))


def test_no_checkpoint(tmp_path):
    with pytest.raises(quantplug.ArtefactError, match=r"There is no checkpoint '.*nowhere'"):
        quantplug.load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "model.bin").write_bytes(b"it")
    with pytest.raises(quantplug.ArtefactError, match="is a file of another kind; pass a GGUF file"):
        quantplug.load_checkpoint(tmp_path / "model.bin")
    with pytest.raises(quantplug.ArtefactError, match="holds no model that transformers reads"):
        quantplug.load_checkpoint(tmp_path)


def test_a_model_of_another_kind(tmp_path):
    transformers = transformers_module()
    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(quantplug.ArtefactError, match="is no causal language model but a BertForMaskedLM"):
        quantplug.load_checkpoint(tmp_path)


def test_a_damaged_file(folder, tmp_path, llama):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(quantplug.ArtefactError, match="holds no model that transformers reads"):
        quantplug.load_checkpoint(folder)
    gguf = write_gguf(tmp_path / "it.gguf", llama)
    gguf.write_bytes(b"NONE" + gguf.read_bytes()[4:])
    with pytest.raises(quantplug.ArtefactError, match="holds no model that transformers reads"):
        quantplug.load_checkpoint(gguf)


def test_a_checkpoint_that_lacks_weights(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(quantplug.ArtefactError, match=r"lacks weight 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        quantplug.load_checkpoint(folder)


def test_code_of_a_checkpoint_does_not_run(folder, capfd):
    described = json.loads((folder / "config.json").read_text())
    described |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "own.py").write_text(f"open({os.fspath(folder / 'ran')!r}, 'w')")
    with pytest.raises(quantplug.QuantplugError):
        quantplug.load_checkpoint(folder)
    assert not (folder / "ran").exists()
    assert "Do you wish to run" not in "".join(capfd.readouterr())  # transformers would run it for a "y"


def test_the_vocabulary_fits():
    assert len(tokenizer()) == VOCABULARY


# What a torchvision of another torch says when it is imported.
_BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"
_READ = "import quantplug; print(type(quantplug.load_checkpoint({!r}).model).__name__)"


def beside_a_broken_torchvision(tmp_path, folder, before=""):
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "torchvision.py").write_text(_BROKEN)
    path = os.pathsep.join([os.fspath(tmp_path / "shadow"), *filter(None, sys.path)])
    command = [sys.executable, "-W", "ignore", "-c", before + _READ.format(os.fspath(folder))]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_torchvision_of_another_torch_is_no_obstacle(tmp_path, folder):
    done = beside_a_broken_torchvision(tmp_path, folder)
    assert done.stdout.split() == ["LlamaForCausalLM"], done.stderr


@pytest.mark.slow
def test_a_torchvision_that_was_asked_for_before_is_told_with_the_remedy(tmp_path, folder):
    before = "from transformers.utils import is_torchvision_available as asked; asked(); "
    said = beside_a_broken_torchvision(tmp_path, folder, before).stderr.strip().splitlines()[-1]
    assert "which cannot be imported (RuntimeError: operator torchvision::nms does not exist): read the" in said
    assert "or install the torchvision of torch" in said
