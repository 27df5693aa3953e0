"""`quantplug inspect` and `quantplug evaluate`: files in, tables and files out, one sentence for everything wrong."""

import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

import quantplug
from quantplug import cli


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, 3, 8, 8),)), folder / "model.pt2")
    data = np.random.default_rng(0).standard_normal((9, 3, 8, 8)).astype(np.float32)
    labels = model(torch.from_numpy(data)).argmax(1).numpy()
    np.savez(folder / "data.npz", data)
    np.savez(folder / "labelled.npz", input=data, labels=labels)
    np.savez(folder / "target.npz", input=data, target=labels)
    np.savez(folder / "short.npz", input=data, labels=labels[:5])
    np.savez(folder / "nan.npz", input=data * np.nan, labels=labels)
    (folder / "metric.py").write_text("def hits(outputs, labels):\n    return outputs.argmax(1) == labels\n")
    return folder


@pytest.fixture
def run(monkeypatch, capsys, files):
    def call(line):
        monkeypatch.chdir(files)
        monkeypatch.setattr(sys, "argv", ["quantplug", *line.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call


def test_inspect_prints_the_layers_and_writes_a_page_and_json(run, files):
    code, out, _ = run("inspect model.pt2 -b x86 --data data.npz --save now.json --html page.html")
    assert code == 0
    assert "conv2d" in out
    assert "quantizer.set_module_name" in out or "recipe='accurate'" in out
    found = quantplug.Inspection.from_json((files / "now.json").read_text())
    assert [layer.module_path for layer in found.layers if layer.operator != "input"] == ["0", "3"]
    assert found.backend == "x86"
    assert "program" in found.output
    code, out, _ = run(
        "inspect model.pt2 -b x86 --data data.npz --compare now.json --html after.html --observer minmax"
    )
    assert code == 0
    assert "Before and after" in (files / "after.html").read_text()
    page = (files / "page.html").read_text()
    assert "Before and after" not in page
    assert "No layer is at fault" in page


def test_programs_read_one_document(run):
    code, out, _ = run("evaluate model.pt2 -b x86 --data labelled.npz --json")
    assert code == 0
    assert json.loads(out)["samples"] == 9


@pytest.mark.slow
def test_inspect_begins_behind_what_a_recipe_does_to_the_float_model(run, files):
    code, _, _ = run("inspect model.pt2 -b x86 --data data.npz --save recipe.json --recipe accurate")
    assert code == 0
    found = quantplug.Inspection.from_json((files / "recipe.json").read_text())
    assert found.faults == ()
    assert found.decibels("program") > 30


def test_evaluate_prints_forms_with_intervals_and_writes_json(run, files):
    code, out, _ = run("evaluate model.pt2 -b x86 --data labelled.npz --save scores.json")
    assert code == 0
    assert "9 samples" in out
    assert "Wilson" in out
    assert "pass --calibration" in out
    found = quantplug.Evaluation.from_json((files / "scores.json").read_text())
    assert found.score("float").value == 1
    assert json.loads((files / "scores.json").read_text())["samples"] == 9


def test_evaluate_takes_other_labels_and_a_trusted_metric(run):
    code, out, _ = run("evaluate model.pt2 -b x86 --data target.npz --labels target --metric metric.py:hits --trust")
    assert code == 0
    assert "hits" in out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("inspect model.pt2 -b x68 --data data.npz", "x68"),
        ("inspect model.pt2 -b x86 --data none.npz", "no calibration file 'none.npz'"),
        ("inspect model.pt2 -b x86 --data data.npz --html no/page.html", "no folder"),
        ("inspect model.pt2 -b x86 --data data.npz --save data.npz", "written over an input"),
        ("inspect model.pt2 -b x86 --data data.npz --compare none.json", "no file 'none.json' to compare with"),
        ("inspect model.pt2 -b x86 --data data.npz --compare metric.py", "no inspection"),
        ("inspect model.pt2 -b x86 --data data.npz --compare data.npz", "cannot be read"),
        ("inspect model.pt2 -b x86 --data nan.npz", "arrays"),
        ("inspect model.pt2 -b x86 --data data.npz --recipe quick", "quick"),
        ("evaluate model.pt2 -b x86 --data target.npz", "no array 'labels'"),
        ("evaluate model.pt2 -b x86 --data target.npz --labels targets", "(did you mean 'target'?)"),
        ("evaluate model.pt2 -b x86 --data short.npz", "9 samples and 5 labels"),
        ("evaluate model.pt2 -b x86 --data nan.npz", "NaN"),
        ("evaluate model.pt2 -b x86 --data labelled.npz --metric metric.py:hits", "pass --trust"),
        ("evaluate model.pt2 -b x86 --data labelled.npz --metric top2", "no metric 'top2'"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_nothing_is_written(run, files, line, says):
    before = sorted(files.iterdir())
    code, _, error = run(line)
    assert code == 2
    assert error.startswith("error: ")
    assert says in error
    assert error.strip().count("\n") == 0
    assert sorted(files.iterdir()) == before
