"""What each observer keeps of a trained model's accuracy, beside torchao's, ONNX Runtime's and NNCF's.

    python benchmarks/observers.py --data PATH [--models resnet20 resnet32 kws_dscnn] [--backends xnnpack x86]

PATH is a folder with a `models.py` that has `load(name) -> nn.Module` and `data(name) -> (calibration
inputs, test inputs, labels)`. Quantized models are the reference (q/dq) graphs. Printed are top-1, agreement
with the float model's class and signal to quantization noise of the logits, for each pair of
an activation observer and a weight observer; rows "torchao" use torchao's own classes. ONNX Runtime (onnx,
onnxruntime) and NNCF quantize the same model with the same calibration inputs where they can be imported;
what they do not offer (4 bits) stays empty.
"""

import argparse
import dataclasses
import importlib.util
import logging
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stored
import torch
from data_folder import module_of
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec
from trained import SETTINGS, logits, top1, whole_batches

import quantplug
from quantplug.annotators.presets import get_symmetric_quantization_config
from quantplug.core.calibration.bias_correction import correct_biases
from quantplug.core.observers import observer
from quantplug.quantizers.x86_config import get_x86_quantization_config

EPS = 2.0**-12
BATCH = 32  # inputs; the correction of biases needs two batches of the 96 of the smallest data
SHOWN = {"xnnpack": "XNNPACK", "peers": "x86"}  # as columns of the documents
# (model, calibration inputs, setting) -> what gives logits of inputs, or None where it cannot quantize so.
Peer = Callable[[nn.Module, Tensor, str], Callable[[Tensor], Tensor] | None]
# Activation observer, weight observer; "corrected" ones with bias correction, others with weights rounded by GPTQ.
ROWS = (
    ("torchao minmax", "torchao minmax"),
    ("torchao histogram", "torchao minmax"),
    ("minmax", "minmax"),
    ("histogram", "minmax"),
    ("percentile", "minmax"),
    ("mse", "minmax"),
    ("entropy", "minmax"),
    ("mse", "mse"),
    ("histogram", "minmax corrected"),
    ("mse", "minmax corrected"),
    ("mse", "mse corrected"),
    ("mse", "mse gptq"),
)


def constructor(name: str, per_channel: bool) -> Any:
    """Returns the constructor of an observer by the name it has in the table."""
    theirs = {
        "torchao histogram": HistogramObserver,
        "torchao minmax": PerChannelMinMaxObserver if per_channel else MinMaxObserver,
    }
    return theirs[name].with_args(eps=EPS) if name in theirs else observer(name, per_channel, eps=EPS)


def config(backend: str, setting: str, row: tuple[str, str]) -> QuantizationConfig:
    """Returns the backend's usual config with other observers and weight bounds."""
    low, high, per_channel = SETTINGS[setting]
    base = get_x86_quantization_config() if backend == "x86" else get_symmetric_quantization_config(True)
    activation = dataclasses.replace(base.input_activation, observer_or_fake_quant_ctr=constructor(row[0], False))
    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    axis = 0 if per_channel else None
    weight_observer = constructor(row[1].removesuffix(" corrected").removesuffix(" gptq"), per_channel)
    weight = QuantizationSpec(torch.int8, weight_observer, low, high, scheme, axis)
    return dataclasses.replace(base, input_activation=activation, output_activation=activation, weight=weight)


def quantized(model: nn.Module, calibration: Tensor, backend: str, setting: str, row: tuple[str, str]) -> Any:
    """Returns the reference graph of a model, calibrated."""
    exported = torch.export.export(model, (calibration[:BATCH],)).module()
    quantizer = quantplug.get_quantizer(backend).set_global(config(backend, setting, row))
    prepared = quantplug.prepare_pt2e(exported, quantizer)
    quantplug.calibrate(prepared, calibration.split(BATCH), progress=False)
    if row[1].endswith("gptq"):
        quantplug.GPTQ().apply(prepared, calibration.split(BATCH))
    if row[1].endswith("corrected"):
        correct_biases(prepared, calibration.split(BATCH))
    return quantplug.convert_pt2e(prepared)


def measured(found: Tensor, expected: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns top-1 and agreement in percent, and SQNR in dB where anything differs."""
    agreement = float((found.argmax(1) == expected.argmax(1)).float().mean() * 100)
    noise = quantplug.sqnr(found, expected)
    numbers = {"top-1": top1(found, labels), "agreement": agreement, **({"dB": noise} if noise < math.inf else {})}
    return {name: round(number, 1) for name, number in numbers.items()}


def ours(backend: str, row: tuple[str, str]) -> Peer:
    """Returns how our flow quantizes with a pair of observers."""

    def quantize(model: nn.Module, calibration: Tensor, setting: str) -> Callable[[Tensor], Tensor] | None:
        if backend == "xnnpack" and SETTINGS[setting][0] > -127:
            return None  # it has no convolutions of 4-bit weights and would leave them float
        graph = quantized(model, calibration, backend, setting, row)
        return lambda inputs: logits(graph, inputs, BATCH)

    return quantize


def onnx_runtime(method: str) -> Peer:
    """Returns how ONNX Runtime's static quantization (u8 activations, s8 weights) does it."""

    def quantize(model: nn.Module, calibration: Tensor, setting: str) -> Callable[[Tensor], Tensor] | None:
        import onnxruntime
        from onnxruntime import quantization as ort

        low, _, per_channel = SETTINGS[setting]
        if low > -127:
            return None
        with tempfile.TemporaryDirectory() as folder:
            source, target = f"{folder}/float.onnx", f"{folder}/int8.onnx"
            axes = {"x": {0: "batch"}, "y": {0: "batch"}}
            torch.onnx.export(model, (calibration[:1],), source, input_names=["x"], output_names=["y"],
                              dynamic_axes=axes, dynamo=False)  # fmt: skip
            ort.quantize_static(
                source, target, Reader(calibration), ort.QuantFormat.QDQ, per_channel=per_channel,
                activation_type=ort.QuantType.QUInt8, weight_type=ort.QuantType.QInt8,
                calibrate_method=ort.CalibrationMethod[method],
            )  # fmt: skip
            session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
        return lambda inputs: torch.cat(
            [torch.from_numpy(session.run(None, {"x": part.numpy()})[0]) for part in inputs.split(BATCH)]
        )

    return quantize


class Reader:
    """Calibration batches in the form ONNX Runtime asks for."""

    def __init__(self, calibration: Tensor) -> None:
        self.batches = iter(calibration.split(BATCH))

    def get_next(self) -> dict[str, Any] | None:
        """Returns the next batch, or None at the end."""
        batch = next(self.batches, None)
        return None if batch is None else {"x": batch.numpy()}


def nncf_quantized(model: nn.Module, calibration: Tensor, setting: str) -> Callable[[Tensor], Tensor] | None:
    """Quantizes with NNCF's own post-training algorithm (bias correction included), fake-quantized in torch."""
    import nncf

    if setting != "int8 weights, per channel":
        return None
    data = nncf.Dataset(list(calibration.split(BATCH)))
    exported = torch.export.export(model, (calibration[:BATCH],)).module()
    # Without its 7-bit weights, which are for the saturation of processors without VNNI.
    advanced = nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.DISABLE)
    graph = nncf.quantize(exported, data, subset_size=len(calibration) // BATCH, advanced_parameters=advanced)
    return lambda inputs: logits(graph, inputs, BATCH)


def importable(*names: str) -> bool:
    """Tells whether modules are installed."""
    return all(importlib.util.find_spec(name) for name in names)


def peers() -> dict[tuple[str, str], Peer]:
    """Returns the peers that are installed, by the two names of a row."""
    found: dict[tuple[str, str], Peer] = {}
    if importable("onnx", "onnxruntime"):
        found |= {("ONNX Runtime", method): onnx_runtime(method) for method in ("MinMax", "Entropy", "Percentile")}
    if importable("nncf"):
        found["NNCF", "its own"] = nncf_quantized
    return found


def results(
    folder: Any, name: str, backend: str, rows: dict[tuple[str, str], Peer], settings: list[str], count: int | None
) -> list[stored.Record]:
    """Returns what each row of one model keeps in each setting, on at most `count` test inputs."""
    model, (calibration, inputs, labels) = folder.load(name), folder.data(name)
    (calibration,), (inputs, labels) = (
        whole_batches(calibration, size=BATCH),
        whole_batches(inputs[:count], labels[:count], size=BATCH),
    )
    expected, found = logits(model, inputs, BATCH), []
    rows = {("float", ""): lambda model, _, setting: model if setting == settings[0] else None, **rows}
    for row, quantize in rows.items():
        for setting in settings:
            run = quantize(model, calibration, setting)
            if run is not None:
                of = {"model": name, "backend": SHOWN.get(backend, backend), "setting": setting}
                of["activations / weights"] = label(*row)
                found.append({**of, **measured(run(inputs), expected, labels)})
                Console(stderr=True, width=160).print(*found[-1].values())
    return found


def label(activations: str, weights: str) -> str:
    """Returns how a row is called: its observers, and what else was done."""
    weights, _, then = weights.removeprefix("torchao ").partition(" ")
    also = {"corrected": ", bias correction", "gptq": ", GPTQ", "own": " own"}.get(then, "")
    return f"{activations} / {weights}{also}".removesuffix(" / ")


def table(found: list[stored.Record], settings: list[str]) -> Table:
    """Returns the table of one model and backend."""
    shown = Table(
        "activations / weights", *settings, title="top-1 %, agreement %, SQNR dB; {model}, {backend}".format(**found[0])
    )
    rows: dict[str, dict[str, str]] = {}
    for each in found:
        cell = "  ".join(f"{each[number]:.1f}" for number in ("top-1", "agreement", "dB") if number in each)
        rows.setdefault(each["activations / weights"], {})[each["setting"]] = cell
    for name, cells in rows.items():
        shown.add_row(name, *(cells.get(setting, "") for setting in settings))
    return shown


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=["resnet20", "resnet32", "kws_dscnn"])
    parser.add_argument("--backends", nargs="*", default=["xnnpack", "x86"])
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--inputs", type=int, help="at most so many test inputs")
    parser.add_argument("--no-peers", action="store_true", help="leave out ONNX Runtime and NNCF")
    stored.add_option(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    folder = module_of(arguments.data, "models")
    for name in arguments.models:
        tried = {backend: {row: ours(backend, row) for row in ROWS} for backend in arguments.backends}
        if found := {} if arguments.no_peers else peers():
            tried["peers"] = found
        for backend, rows in tried.items():
            records = results(folder, name, backend, rows, arguments.settings, arguments.inputs)
            Console(width=200).print(table(records, arguments.settings))
            stored.store(arguments.store, records, ("model", "backend", "setting", "activations / weights"))


if __name__ == "__main__":
    main()
