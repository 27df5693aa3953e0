"""The demo's table: what it says of a model is what the model's artefact gives."""

import torch

from quantplug.core.compare import sqnr
from quantplug.demo import BATCH, DigitNet, Digits, comparison, load_digits
from quantplug.flow import export, quantize


def test_e14_the_table_has_a_row_of_float16():
    digits, model = load_digits(), DigitNet().eval()
    few = Digits(digits.train, digits.train_labels, digits.test[:BATCH], digits.test_labels[:BATCH])
    half = quantize(model, (few.test,), "x86", config="float16", progress=False)
    table = comparison(model, export(model, (few.test,)), {"float16, x86": half}, few)
    names, accuracy, agreement, noise, sizes, _ = (list(column.cells) for column in table.columns)
    assert names == ["float32, PyTorch", "float16, x86"]
    with torch.no_grad():
        expected, found = model(few.test), half(few.test)
    assert accuracy[1] == f"{(found.argmax(1) == few.test_labels).double().mean() * 100:.1f} %"
    assert agreement[1] == f"{(found.argmax(1) == expected.argmax(1)).double().mean() * 100:.1f} %"
    assert float(noise[1].split()[0]) > 60
    assert abs(float(noise[1].split()[0]) - float(sqnr(found, expected))) < 0.2
    assert int(sizes[1].split()[0]) < 0.85 * int(sizes[0].split()[0])  # the graph is 100 kB of the file
