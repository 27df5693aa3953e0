"""Writes one file of each format, for a model of a few numbers.

`python tests/file_formats.py tests/golden/VERSION` keeps those of a release, so that the next ones are held to them.
"""

import contextlib
import json
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

import quantplug

X = torch.arange(8).reshape(2, 4) / 4 - 1


def model():
    """Two layers whose numbers are the same everywhere."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        for place, value in enumerate(layers.parameters()):
            value.copy_(((torch.arange(value.numel()) * 7 + place * 3) % 13 / 8 - 0.75).reshape(value.shape))
    return layers


def prepared(**options):
    """The model between prepare and calibration."""
    exported, quantizer = torch.export.export(model(), (X,)).module(), quantplug.get_quantizer("xnnpack")
    return quantplug.prepare_pt2e(exported, quantizer.set_global(quantizer.backend.config("int8", **options)))


def stopped(path):
    """Calibrates with a checkpoint and stops in the midst, as a killed process does."""

    def batches():
        yield from (X, 2 * X)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        quantplug.calibrate(prepared(observer="minmax"), batches(), checkpoint=path, checkpoint_every=1, progress=False)


def searched(log):
    """Searches with a log."""
    return quantplug.tune(model(), (X,), [X], at_least=1.0, backend="x86", trials=2, log=log, progress=False)


def write(folder: Path) -> None:
    """Writes a file of each format."""
    calibrated = prepared()
    quantplug.calibrate(calibrated, [X, 2 * X], progress=False)
    (folder / "plan.json").write_text(quantplug.plan_of(calibrated).json())
    (folder / "sensitivity.json").write_text(quantplug.sensitivity(calibrated, [X]).to_json())
    (folder / "report.json").write_text(quantplug.explain(quantplug.convert_pt2e(calibrated)).json())
    stopped(folder / "calibration.pt")
    for backend, name in (("x86", "x86.pt2"), ("openvino", "openvino.zip"), ("onnxruntime", "onnxruntime.onnx")):
        config = quantplug.get_quantizer(backend).backend.config("int8", weight_bits=7)  # which any processor reads
        quantplug.quantize(model(), (X,), backend, [X, 2 * X], config, progress=False).save(folder / name)
    engines = {"": "onednn", "2": "openvino"}
    config = quantplug.get_quantizer("x86").backend.config("int8", weight_bits=7)
    joined = quantplug.quantize(model(), (X,), "x86", [X, 2 * X], config, engine=engines, progress=False)
    joined.save(folder / "joined.zip")
    searched(folder / "tune.jsonl")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    write(where)
    print(json.dumps({path.name: path.stat().st_size for path in sorted(where.iterdir())}))
