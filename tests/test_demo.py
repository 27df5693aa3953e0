"""The demo's table: what it says of a model is what the model's artefact gives."""

import pytest
import torch
from rich.console import Console

import quantplug.demo as demo
from quantplug.core.specs.levels import sqnr
from quantplug.demo import BATCH, DigitNet, Digits, comparison, load_digits, measured
from quantplug.flow import export, quantize


def test_e14_the_table_has_a_row_of_float16():
    digits, model = load_digits(), DigitNet().eval()
    few = Digits(digits.train, digits.train_labels, digits.test[:BATCH], digits.test_labels[:BATCH])
    half = quantize(model, (few.test,), "x86", config="float16", progress=False)
    table = comparison(measured(model, export(model, (few.test,)), {"float16, x86": half}, few), len(few.test))
    names, accuracy, agreement, noise, sizes, _ = (list(column.cells) for column in table.columns)
    assert names == ["float32, PyTorch", "float16, x86"]
    with torch.no_grad():
        expected, found = model(few.test), half(few.test)
    assert accuracy[1] == f"{(found.argmax(1) == few.test_labels).double().mean() * 100:.1f} %"
    assert agreement[1] == f"{(found.argmax(1) == expected.argmax(1)).double().mean() * 100:.1f} %"
    assert float(noise[1].split()[0]) > 60
    assert abs(float(noise[1].split()[0]) - float(sqnr(found, expected))) < 0.2
    assert int(sizes[1].split()[0]) < 0.85 * int(sizes[0].split()[0])  # the graph is 100 kB of the file


@pytest.mark.slow
def test_e14_the_demo_shows_float16_beside_the_other_configs(tmp_path, monkeypatch):
    digits = load_digits()
    few = Digits(digits.train[:32], digits.train_labels[:32], digits.test[:32], digits.test_labels[:32])
    monkeypatch.setattr(demo, "load_digits", lambda: few)
    monkeypatch.setattr(demo, "train", lambda digits: DigitNet(8).eval())
    monkeypatch.setattr(demo, "_speedup", lambda *arguments: 1.0)
    monkeypatch.setattr(demo, "draw_layers", lambda *arguments: None)
    console = Console(record=True, width=160)
    demo.run(tmp_path / "out", console)
    page = (tmp_path / "out" / "inspection_x86.html").read_text()
    assert page.count('<section class="card') == 6  # three layers that cost decibels, and three that take time
    rows = [line.split() for line in console.export_text().splitlines()]
    half = next(row for row in rows if row[:2] == ["float16,", "x86"])
    assert half.count("%") == 2, "no accuracy or agreement"
    assert {tuple(row[:2]) for row in rows} > {("int8,", "xnnpack"), ("int8,", "x86"), ("float32,", "PyTorch")}
