"""Weights stay in files until they are read, and go; what comes of them is the same, byte by byte."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from extras import transformers_module
from language_models import causal, texts, write_folder, write_gguf

import quantplug
from quantplug.core.files.scratch import in_scratch
from quantplug.core.peers.linux import let_go
from quantplug.language.weights import weights_let_go
from quantplug.lowering.xnnpack.program import XNNPACKProgram

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose a page is")
REPOSITORY = Path(__file__).parents[2]
MB = 2**20


def of_files():
    """Returns MB of mapped files that are resident; pages of deleted ones are those of files too."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith(("RssFile", "RssShmem"))) / 1024


def bytes_of(model, **options):
    made = quantplug.quantize_language_model(model, context=32, progress=False, **options)
    assert isinstance(made.program, XNNPACKProgram)
    return made.program.buffer


@pytest.fixture(scope="module")
def llama():
    return causal()


@pytest.mark.parametrize("kind", ["folder", "shards", "gguf"])
def test_a_checkpoint_in_files_gives_the_bytes_of_a_model_in_memory(kind, tmp_path, llama):
    if kind == "gguf":
        path = write_gguf(tmp_path / "it.gguf", llama)
    else:
        llama.save_pretrained(tmp_path, max_shard_size="100KB" if kind == "shards" else "1GB")
        path = write_folder(tmp_path, llama) if kind == "folder" else tmp_path
        if kind == "shards":
            from language_models import tokenizer

            tokenizer().save_pretrained(path)
            assert len(list(path.glob("*.safetensors"))) > 1
    found = quantplug.load_checkpoint(path)
    expected = bytes_of(llama)
    for _ in range(2):
        assert bytes_of(quantplug.load_checkpoint(path).model, keep=False) == expected
    assert bytes_of(found.model) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_expanded_as_transformers_does(dtype, tmp_path):
    model = causal(num_hidden_layers=1).to(dtype)
    path = write_folder(tmp_path, model)
    kind = transformers_module().AutoModelForCausalLM
    theirs = kind.from_pretrained(path, dtype=torch.float32).eval()
    ours = quantplug.load_checkpoint(path).model
    assert {weight.dtype for weight in ours.parameters()} == {torch.float32}
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name


def test_an_index_that_leads_out_of_the_folder(tmp_path, llama):
    path = write_folder(tmp_path / "it", llama)
    (path / "model.safetensors").rename(tmp_path / "other.safetensors")
    index = {"weight_map": {"lm_head.weight": "../other.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(quantplug.ArtefactError, match=r"names '../other.safetensors', which is outside of the folder"):
        quantplug.load_checkpoint(path)


@linux
def test_pages_of_files_go_and_come_back():
    values = torch.randn(8 * MB)
    kept = in_scratch(values)
    for _ in range(2):
        assert torch.equal(kept, values)
        before = of_files()
        assert let_go(kept)
        assert of_files() < before - 30
    assert torch.equal(kept, values)


@linux
def test_memory_of_the_process_stays(tmp_path):
    own = torch.randn(MB)
    expected = own.clone()
    assert not let_go(own)
    assert torch.equal(own, expected)
    path = tmp_path / "it.bin"
    path.write_bytes(own.numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=MB)
    mapped[MB // 2] = 7  # in a page of our own now
    assert not let_go(mapped)
    assert float(mapped[MB // 2]) == 7


@linux
def test_what_is_written_to_a_scratch_file_stays():
    kept = in_scratch(torch.zeros(MB))
    kept[5] = 3
    assert let_go(kept)
    assert float(kept[5]) == 3


@linux
def test_no_room_for_weights(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(quantplug.ArtefactError, match=r"has no room for weights of 4\.2 MB .*set TMPDIR"):
        in_scratch(torch.zeros(MB))


@linux
def test_layers_let_go_of_what_they_have_read(tmp_path):
    model = causal(num_hidden_layers=2, hidden_size=512, intermediate_size=4096)
    loaded = quantplug.load_checkpoint(write_folder(tmp_path, model)).model
    whole = sum(weight.nbytes for weight in loaded.parameters()) / MB
    with torch.no_grad():
        before = of_files()
        with weights_let_go(loaded):
            logits = loaded(input_ids=texts(8)[0]).logits
        assert of_files() - before < whole / 2
        assert torch.equal(loaded(input_ids=texts(8)[0]).logits, logits)
    assert not any(module._forward_hooks for module in loaded.modules())


@linux
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_of_a_model_of_a_quarter_of_a_gigabyte(dtype):
    shape = ["--layers", "4", "--hidden", "1024", "--vocabulary", "8000", "--dtype", dtype]
    command = [sys.executable, "benchmarks/llm_memory.py", *shape]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["above_libraries_times_weights"] < 1.2, found
