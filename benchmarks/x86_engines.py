"""The engines of the x86 benchmark: each builds its artefacts into a folder once, and loads them to be timed.

Engines whose package is missing are left out. Nothing here is special to a model.
"""

import importlib.util
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from vision import torchvision_models
from x86_models import Bert, Case

import quantplug
from quantplug.lowering.openvino import OpenVINOProgram
from quantplug.lowering.x86 import X86Program, lower

Run = Callable[..., Any]
Inputs = tuple[Tensor, ...]
Way = tuple[str, Run, Path | None]


@dataclass(frozen=True)
class Engine:
    """One engine, with all the ways in which it runs.

    Attributes:
        name: what the command line calls it.
        needs: packages without which it is left out.
        build: writes artefacts into a folder; returns seconds from the float model to a quantized one.
        load: from the model's inputs, yields (way, what runs, artefact's file or None).
    """

    name: str
    needs: tuple[str, ...]
    build: Callable[[Case, Path], float]
    load: Callable[[Inputs, Path, bool], Iterator[Way]]

    @property
    def is_there(self) -> bool:
        """Tells whether its packages are installed."""
        return all(importlib.util.find_spec(package) for package in self.needs)


def _package(exported: torch.export.ExportedProgram, path: Path) -> None:
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs={"freezing": True})


def _packaged(path: Path) -> Run:
    loaded: Run = torch._inductor.aoti_load_package(str(path))
    return loaded


def _compiled(module: torch.nn.Module, inputs: Inputs) -> Run:
    run = torch.compile(module)

    def call(*given: Tensor) -> Any:
        with torch._inductor.config.patch(freezing=True), torch.no_grad():
            return run(*given)

    call(*inputs)
    return call


# ---- torch in float


def _build_float(case: Case, folder: Path) -> float:
    torch.save(case.model, folder / "model.pt")
    _package(torch.export.export(case.model, case.inputs), folder / "fp32.pt2")
    return 0.0


def _load_float(inputs: Inputs, folder: Path, compiles: bool) -> Iterator[Way]:
    torchvision_models()  # the pickled model needs it
    yield "fp32 eager", torch.load(folder / "model.pt", weights_only=False), None
    yield "fp32 inductor package", _packaged(folder / "fp32.pt2"), folder / "fp32.pt2"


# ---- torchao


def _torchao_graph(case: Case) -> fx.GraphModule:
    """Quantizes with torchao's own quantizer, which needs strict export."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(case.model, case.inputs, strict=True).module(), quantizer)
    with torch.no_grad():
        for batch in case.calibration:
            prepared(*batch)
    converted: fx.GraphModule = convert_pt2e(prepared)
    return converted


def _build_torchao(case: Case, folder: Path) -> float:
    started = time.perf_counter()
    converted = _torchao_graph(case)
    seconds = time.perf_counter() - started
    exported = torch.export.export(converted, case.inputs)
    torch.export.save(exported, folder / "graph.pt2")
    _package(exported, folder / "package.pt2")
    return seconds


def _load_torchao(inputs: Inputs, folder: Path, compiles: bool) -> Iterator[Way]:
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

    graph = torch.export.load(folder / "graph.pt2").module()
    yield "torchao eager", lower_pt2e_quantized_to_x86(graph, inputs), None
    yield "torchao package", _packaged(folder / "package.pt2"), folder / "package.pt2"
    if compiles:
        yield "torchao compile", _compiled(graph, inputs), None


# ---- quantplug


def _graph(case: Case, backend: str) -> fx.GraphModule:
    quantizer = quantplug.get_quantizer(backend)
    prepared = quantplug.prepare_pt2e(torch.export.export(case.model, case.inputs).module(), quantizer)
    quantplug.calibrate(prepared, case.calibration, progress=False)
    return quantplug.convert_pt2e(prepared)


def _build_quantplug(case: Case, folder: Path) -> float:
    started = time.perf_counter()
    converted = _graph(case, "x86")
    seconds = time.perf_counter() - started
    program = lower(converted, case.inputs)
    program.save(folder / "program.pt2")
    program.package(folder / "package.pt2")
    return seconds


def _load_quantplug(inputs: Inputs, folder: Path, compiles: bool) -> Iterator[Way]:
    program = X86Program.load(folder / "program.pt2")
    yield "quantplug eager", program, folder / "program.pt2"
    yield "quantplug package", _packaged(folder / "package.pt2"), folder / "package.pt2"
    if compiles:
        run = program.compile()
        run(*inputs)
        yield "quantplug compile", run, None


def _build_through_openvino(case: Case, folder: Path) -> float:
    started = time.perf_counter()
    converted = _graph(case, "openvino")
    seconds = time.perf_counter() - started
    quantplug.get_quantizer("openvino").backend.lower(converted, case.inputs).save(folder / "model.zip")
    return seconds


def _load_through_openvino(inputs: Inputs, folder: Path, compiles: bool) -> Iterator[Way]:
    path = folder / "model.zip"
    yield "quantplug through OpenVINO", OpenVINOProgram.load(path), path
    yield "the same, bf16 in float parts", OpenVINOProgram.load(path, {"INFERENCE_PRECISION_HINT": "bf16"}), path


# ---- OpenVINO with its own quantizer


def _build_openvino(case: Case, folder: Path) -> float:
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    model = openvino.convert_model(case.model, example_input=case.inputs)
    batches = nncf.Dataset(case.calibration, lambda batch: [each.numpy() for each in batch])
    kind = nncf.ModelType.TRANSFORMER if case.is_transformer else None
    started = time.perf_counter()
    quantized = nncf.quantize(model, batches, model_type=kind, subset_size=len(case.calibration))
    seconds = time.perf_counter() - started
    openvino.save_model(quantized, folder / "model.xml", compress_to_fp16=False)
    return seconds


def _load_openvino(inputs: Inputs, folder: Path, compiles: bool) -> Iterator[Way]:
    import openvino

    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.compile_model(str(folder / "model.xml"), "CPU", options)
    request = compiled.create_infer_request()

    def run(*given: Tensor) -> Tensor:
        results = request.infer([each.numpy() for each in given], share_inputs=True)
        return torch.from_numpy(results[compiled.outputs[0]])

    yield "OpenVINO, NNCF", run, folder / "model.bin"


# ---- ONNX Runtime


class _Reader:
    def __init__(self, case: Case) -> None:
        self.batches = iter([{"x": batch[0].numpy()} for batch in case.calibration])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.batches, None)


def _build_onnx(case: Case, folder: Path) -> float:
    from onnxruntime import quantization as ort
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model: torch.nn.Module = case.model
    if isinstance(model, Bert):  # the exporter does not know the fused attention
        weights = model.state_dict()
        model = Bert("eager").eval()
        model.load_state_dict(weights)
    original, prepared = folder / "float.onnx", folder / "prepared.onnx"
    torch.backends.mha.set_fastpath_enabled(False)  # the exporter does not know the fused layers
    torch.onnx.export(model, case.inputs, str(original), input_names=["x"], dynamo=False, opset_version=17)
    started = time.perf_counter()
    quant_pre_process(str(original), str(prepared), skip_symbolic_shape=True)
    kinds = {"activation_type": ort.QuantType.QUInt8, "weight_type": ort.QuantType.QInt8, "per_channel": True}
    ort.quantize_static(
        str(prepared), str(folder / "static.onnx"), _Reader(case), quant_format=ort.QuantFormat.QDQ, **kinds
    )
    seconds = time.perf_counter() - started
    if case.is_transformer:
        ort.quantize_dynamic(
            str(prepared), str(folder / "dynamic.onnx"), weight_type=ort.QuantType.QInt8, per_channel=True
        )
    for path in (original, prepared):
        path.unlink()
    return seconds


def _load_onnx(inputs: Inputs, folder: Path, compiles: bool) -> Iterator[Way]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    for path in sorted(folder.glob("*.onnx")):
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

        def run(*given: Tensor, session: Any = session) -> Tensor:
            return torch.from_numpy(session.run(None, {"x": given[0].numpy()})[0])

        yield f"ONNX Runtime, {path.stem}", run, path


ENGINES = (
    Engine("float", (), _build_float, _load_float),
    Engine("torchao", (), _build_torchao, _load_torchao),
    Engine("quantplug", (), _build_quantplug, _load_quantplug),
    Engine("onnxruntime", ("onnx", "onnxruntime"), _build_onnx, _load_onnx),
    Engine("openvino", ("openvino", "nncf"), _build_openvino, _load_openvino),
    Engine("through_openvino", ("openvino",), _build_through_openvino, _load_through_openvino),
)


def build(engine: Engine, case: Case, folder: Path) -> None:
    """Builds an engine's artefacts unless they are there already; `seconds` beside them is the time to quantize."""
    if (folder / "seconds").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seconds = engine.build(case, folder)
    (folder / "seconds").write_text(str(seconds))
