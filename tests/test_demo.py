"""The demo's table: what it says of a model is what the model's artefact gives."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

import quantplug.demo as demo
from quantplug.core.specs.levels import sqnr
from quantplug.demo import BATCH, DigitNet, Digits, comparison, load_digits, measured
from quantplug.flow import export, quantize

PICTURE = (
    Path(__file__).parent.parent / "docs" / "inspection.png"
)  # taken as the last test takes it, of a trained model


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


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Runs the demo with few digits and a model that is not trained; returns its folder and what it printed."""
    out, digits = tmp_path_factory.mktemp("demo") / "out", load_digits()
    few = Digits(digits.train[:32], digits.train_labels[:32], digits.test[:32], digits.test_labels[:32])
    console = Console(record=True, width=160)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(demo, "load_digits", lambda: few)
        patched.setattr(demo, "train", lambda digits: DigitNet(8).eval())
        patched.setattr(demo, "_speedup", lambda *arguments: 1.0)
        patched.setattr(demo, "draw_layers", lambda *arguments: None)
        demo.run(out, console)
    return out, console.export_text()


@pytest.mark.slow
def test_e14_the_demo_shows_float16_beside_the_other_configs(shown):
    out, printed = shown
    page = (out / "inspection_x86.html").read_text()
    assert page.count('<section class="card') == 6  # three layers that cost decibels, and three that take time
    rows = [line.split() for line in printed.splitlines()]
    half = next(row for row in rows if row[:2] == ["float16,", "x86"])
    assert half.count("%") == 2, "no accuracy or agreement"
    assert {tuple(row[:2]) for row in rows} > {("int8,", "xnnpack"), ("int8,", "x86"), ("float32,", "PyTorch")}


# Shows a page in a frame, and writes down where its cards are.
_FRAME = """<!doctype html><body>
<iframe id="page" src="inspection_x86.html" style="border: 0; width: 1400px; height: 880px"></iframe>
<script>page.onload = () => {
  const cards = [...page.contentDocument.querySelectorAll("section.card")].map(card => {
    const box = card.getBoundingClientRect();
    return {layer: card.dataset.layer, text: card.innerText, top: box.top, bottom: box.bottom, width: box.width};
  });
  const images = [...page.contentDocument.images].map(image => image.naturalWidth);
  const found = Object.assign(document.createElement("pre"), {textContent: JSON.stringify({cards, images})});
  document.body.append(found);
}</script></body>"""


@pytest.mark.slow
def test_a_browser_shows_the_three_costliest_layers_first(shown):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    out, _ = shown
    (out / "frame.html").write_text(_FRAME)
    call = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    call += ["--window-size=1400,880", "--hide-scrollbars", "--virtual-time-budget=10000"]
    frame = [*call, "--dump-dom", (out / "frame.html").as_uri()]
    page = subprocess.run(frame, check=True, capture_output=True, text=True, timeout=60)
    found = json.loads(html.unescape(page.stdout.rpartition("<pre>")[2].partition("</pre>")[0]))
    cards, text = found["cards"], (out / "inspection_x86.html").read_text()
    assert [card["layer"] for card in cards] == re.findall(r'data-layer="([^"]+)"', text)
    assert len(cards) == 6
    assert all("dB" in card["text"] and "quant" in card["text"] for card in cards[:3])
    assert all("µs" in card["text"] for card in cards[3:])
    assert all(0 < card["top"] < card["bottom"] < 880 for card in cards), "nobody has to scroll"
    assert all(card["width"] > 300 for card in cards)
    assert found["images"]
    assert all(width > 100 for width in found["images"])
    picture = out / "inspection.png"
    subprocess.run([*call, f"--screenshot={picture}", (out / "inspection_x86.html").as_uri()], check=True, timeout=60)
    drawn = imread(picture)
    assert drawn.shape == imread(PICTURE).shape
    assert drawn[..., :3].std() > 0.05
