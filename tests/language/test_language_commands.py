"""`quantplug llm` and `quantplug generate`, end to end, and what they refuse before the work begins."""

import json
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from language_models import causal, tokenizer, write_folder, write_gguf

import quantplug
from quantplug import cli
from quantplug.language import command
from quantplug.lowering.x86 import X86Program


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm")
    model = causal(num_hidden_layers=1)
    write_folder(folder / "model", model)
    write_gguf(folder / "model.gguf", model)
    generator = random.Random(0)
    words = ["".join(generator.choice("abcdefg") for _ in range(4)) for _ in range(900)]
    (folder / "text.txt").write_text(" ".join(words))
    (folder / "short.txt").write_text("a cab")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    return folder


@pytest.fixture
def run(monkeypatch, capsys, files):
    """Runs the command line in the folder of the files; returns exit code, output and errors."""

    def call(*words):
        monkeypatch.chdir(files)
        monkeypatch.setattr(sys, "argv", ["quantplug", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call


def converted(run, files, model, backend, *options):
    out = files / f"{backend}{'.pte' if backend == 'xnnpack' else '.pt2'}"
    words = ("llm", model, "--backend", backend, "--out", out.name, "--context", "32", "--no-progress", *options)
    code, printed, errors = run(*words)
    assert code == 0, errors
    table = " ".join(printed.split())
    for row in ("size", "prefill of 16 tokens", "decode of 16 tokens", "peak memory", f"Wrote {out.name}."):
        assert row in table
    return out, table


def generated(run, out, model):
    words = ("generate", out.name, "--tokenizer", model, "--prompt", "bad cab", "--max-new-tokens", "12")
    code, text, errors = run(*words)
    assert code == 0, errors
    assert run(*words)[1] == text
    reader, artefact = tokenizer(), quantplug.load_language_model(out)
    tokens = list(artefact.generate(reader("bad cab").input_ids, 12))
    assert text == reader.decode(tokens, skip_special_tokens=True) + "\n"
    assert len(text) > 5


@pytest.mark.slow
@pytest.mark.parametrize(("model", "recipe"), [("model", ("--recipe", "fast", "--limit", "2")), ("model.gguf", ())])
def test_from_a_checkpoint_to_text_on_x86(model, recipe, run, files):
    out, table = converted(run, files, model, "x86", "--calibration", "text.txt", "--score", "1", *recipe)
    generated(run, out, model)
    before, behind = map(float, re.findall(r"perplexity, \w+ ([\d.]+)", table))
    assert 0.8 < behind / before < 1.25
    assert ("bias" in table) == ("fast" in recipe)  # what the recipe did
    assert X86Program.load(out).constants["get_eos_ids"] == [2]


@pytest.mark.slow
def test_from_a_checkpoint_to_text_on_xnnpack(run, files):
    out, table = converted(run, files, "model", "xnnpack", "--config", "8da4w", "--calibration", "text.txt")
    generated(run, out, "model")
    assert "perplexity, artefact" in table


@pytest.mark.slow
def test_figures_and_text_as_json(run, files):
    words = ("--backend", "x86", "--config", "int8_dynamic", "--calibration", "text.txt", "--score", "1")
    recipe = ("--recipe", "fast", "--limit", "2")
    code, printed, errors = run("llm", "model", "--out", "json.pt2", "--context", "32", *words, *recipe, "--json")
    assert code == 0, errors
    found = json.loads(printed)
    assert found["bytes"] == (files / "json.pt2").stat().st_size
    assert found["perplexity_float"] > 1
    assert found["decode"] > 0
    assert [done for done in found["applied"] if "bias" in done] == found["applied"] != []
    words = ("generate", "json.pt2", "--tokenizer", "model", "--prompt", "bad cab", "--max-new-tokens", "6")
    assert run(*words)[1] == json.loads(run(*words, "--json")[1])["text"] + "\n"
    assert run(*words, "--quiet")[:2] == (0, "")


def refused(run, said, *words):
    code, _, errors = run(*words)
    assert code == 2
    assert said in " ".join(errors.split())
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("There is no folder", ("--out", "nowhere/m.pte")),
        ("is a device or a pipe", ("--out", "/dev/full")),
        ("'m.pt2' is for backend 'xnnpack'; end its name in .pte", ("--out", "m.pt2")),
        ("Backend 'xnnpack' has no config 'int5'", ("--out", "m.pte", "--config", "int5")),
        ("writes no language models; choose one of", ("--out", "m.pte", "--backend", "openvino")),
        ("no recipe", ("--out", "m.pte", "--recipe", "slow")),
        ("Backend 'xnnpack' has no tables of embeddings in 'int5'", ("--out", "m.pte", "--table", "int5")),
        ("Recipe 'fast' needs data; pass --calibration", ("--out", "m.pte", "--recipe", "fast")),
    ],
)
def test_what_cannot_end_well_is_refused_before_the_model_is_read(said, options, run, monkeypatch):
    monkeypatch.setattr(command, "load_checkpoint", lambda path: pytest.fail("it was read"))
    refused(run, said, "llm", "model", *options)


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("There is no checkpoint 'none'", ("none",)),
        ("'short.txt' has", ("model", "--calibration", "short.txt")),
        ("is no text in UTF-8", ("model", "--calibration", "binary.txt")),
        ("There is no file 'none.txt'", ("model", "--calibration", "none.txt")),
        ("give 2 to 640", ("model", "--context", "1000")),
    ],
)
def test_what_does_not_fit_is_one_sentence(said, options, run, files):
    refused(run, said, "llm", *options, "--out", "m.pte")
    assert not (files / "m.pte").exists()


def test_a_disk_without_room_is_told_before_the_work(run, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    monkeypatch.setattr(command, "quantize_language_model", lambda *args, **options: pytest.fail("it worked"))
    refused(run, "or more, and there are 0.0 MB; free or change its place.", "llm", "model", "--out", "m.pte")


def test_an_interruption_leaves_no_half_file(run, files, monkeypatch):
    def save(program, path):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(X86Program, "save", save)
    before = sorted(files.iterdir())
    code, _, _ = run("llm", "model", "--backend", "x86", "--out", "half.pt2", "--context", "64")
    assert code != 0
    assert sorted(files.iterdir()) == before


@pytest.mark.slow
def test_what_generate_refuses(run, files):
    artefact = quantplug.quantize_language_model(causal(num_hidden_layers=1), "x86", "float32", context=16)
    artefact.save(files / "small.pt2")
    words = ("generate", "small.pt2", "--tokenizer", "model", "--prompt")
    refused(run, "The prompt is empty", *words, "")
    refused(run, "tokens, and the cache holds 16; shorten it", *words, "a cab fed a bad egg a cab fed a bad egg")
    refused(run, "There is no file 'none.pte'", "generate", "none.pte", "--tokenizer", "model", "--prompt", "a")
    small = quantplug.quantize_language_model(causal(num_hidden_layers=1, vocab_size=64), "x86", "float32", context=16)
    small.save(files / "few.pt2")
    refused(
        run, "ids up to 199, and the model knows 64", "generate", "few.pt2", "--tokenizer", "model", "--prompt", "a"
    )


def test_a_character_of_several_tokens_is_written_when_it_is_whole():
    class Bytes:
        def decode(self, tokens, skip_special_tokens):
            return bytes(tokens).decode(errors="replace")

    pieces = list(command._text(Bytes(), iter("aé€".encode())))
    assert pieces == ["a", "é", "€", ""]
    assert list(command._text(Bytes(), iter("a€".encode()[:-1]))) == ["a", "\N{REPLACEMENT CHARACTER}"]
