"""The engines of the x86 benchmark: each quantizes a model once, builds artefacts for a batch, loads them to be timed.

Everything is kept in folders and found there again. Engines whose package is missing are left out. Nothing here is
special to a model. On a processor without VNNI each engine takes what it offers against products that overflow:
activations or weights of 7 bits.
"""

import importlib.util
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from vision import torchvision_models
from x86_models import Bert, Case

import quantplug
from quantplug.lowering.onnx import ONNXProgram
from quantplug.lowering.openvino import OpenVINOProgram
from quantplug.lowering.processor import kernels_saturate
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
        quantize: writes a quantized model for any batch into a folder; returns the seconds from the float model to it.
        build: from the case's inputs and that folder, writes what depends on the batch into a second folder.
        load: from the model's inputs and both folders, yields (way, what runs, artefact's file or None).
        shares: the engine whose quantized model it runs too, "" for its own.
    """

    name: str
    needs: tuple[str, ...]
    quantize: Callable[[Case, Path], float]
    build: Callable[[Case, Path, Path], None]
    load: Callable[[Inputs, Path, Path, bool], Iterator[Way]]
    shares: str = ""

    @property
    def is_there(self) -> bool:
        """Tells whether its packages are installed."""
        return all(importlib.util.find_spec(package) for package in self.needs)

    def quantized(self, folder: Path) -> Path:
        """Returns the folder of what any batch shares, within a model's folder."""
        return folder / (self.shares or self.name)


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


class _Autocast(torch.nn.Module):
    """Computes in bfloat16 what stays float."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(*inputs)


def _any_batch(case: Case, *, strict: bool = False) -> fx.GraphModule:
    """Exports a model for any batch, so that it is quantized once."""
    example = case.calibration[0]
    shapes = [{0: torch.export.Dim("batch", max=64)} for _ in example]
    exported = torch.export.export(case.model, example, dynamic_shapes=shapes, strict=strict)
    return exported.module()


def _keep(converted: fx.GraphModule, case: Case, path: Path) -> None:
    example = case.calibration[0]
    shapes = [{0: torch.export.Dim("batch", max=64)} for _ in example]
    torch.export.save(torch.export.export(converted, example, dynamic_shapes=shapes), path)


def _for_batch(path: Path, inputs: Inputs) -> torch.export.ExportedProgram:
    """Reads a graph for any batch and holds it to that of the inputs."""
    return torch.export.export(torch.export.load(path).module(), inputs)


def _nothing_more(case: Case, quantized: Path, folder: Path) -> None:
    """For engines whose file runs any batch."""


# ---- torch in float


def _keep_float(case: Case, folder: Path) -> float:
    torch.save(case.model, folder / "model.pt")
    return 0.0


def _load_float(inputs: Inputs, quantized: Path, folder: Path, compiles: bool) -> Iterator[Way]:
    torchvision_models()  # the pickled model needs it
    model = torch.load(quantized / "model.pt", weights_only=False)
    yield "fp32 eager", model, None
    if compiles:
        yield "fp32 compile", _compiled(model, inputs), None
        yield "bf16 compile", _compiled(_Autocast(model), inputs), None


# ---- torchao


def _quantize_torchao(case: Case, folder: Path) -> float:
    """Quantizes with torchao's own quantizer, which needs strict export."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    started = time.perf_counter()
    config = x86.get_default_x86_inductor_quantization_config(reduce_range=kernels_saturate())
    quantizer = x86.X86InductorQuantizer().set_global(config)
    prepared = prepare_pt2e(_any_batch(case, strict=True), quantizer)
    with torch.no_grad():
        for batch in case.calibration:
            prepared(*batch)
    converted = convert_pt2e(prepared)
    seconds = time.perf_counter() - started
    _keep(converted, case, folder / "graph.pt2")
    return seconds


def _build_torchao(case: Case, quantized: Path, folder: Path) -> None:
    exported = _for_batch(quantized / "graph.pt2", case.inputs)
    torch.export.save(exported, folder / "graph.pt2")
    _package(exported, folder / "package.pt2")
    _package(torch.export.export(_Autocast(exported.module()), case.inputs), folder / "bf16.pt2")


def _load_torchao(inputs: Inputs, quantized: Path, folder: Path, compiles: bool) -> Iterator[Way]:
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

    graph = torch.export.load(folder / "graph.pt2").module()
    yield "torchao eager", lower_pt2e_quantized_to_x86(graph, inputs), None
    yield "torchao package", _packaged(folder / "package.pt2"), folder / "package.pt2"
    yield "torchao package, bf16", _packaged(folder / "bf16.pt2"), folder / "bf16.pt2"
    if compiles:
        yield "torchao compile", _compiled(graph, inputs), None
        yield "torchao compile, bf16", _compiled(_Autocast(graph), inputs), None


# ---- quantplug


def _quantize_quantplug(case: Case, folder: Path, *, backend: str = "x86") -> float:
    started = time.perf_counter()
    prepared = quantplug.prepare_pt2e(_any_batch(case), quantplug.get_quantizer(backend))
    quantplug.calibrate(prepared, case.calibration, progress=False)
    converted = quantplug.convert_pt2e(prepared)
    seconds = time.perf_counter() - started
    _keep(converted, case, folder / "graph.pt2")
    return seconds


def _build_quantplug(case: Case, quantized: Path, folder: Path, *, autotune: bool = False) -> None:
    converted = _for_batch(quantized / "graph.pt2", case.inputs).module()
    program = lower(converted, case.inputs, autotune=autotune)
    program.save(folder / "program.pt2")
    program.package(folder / "package.pt2")


def _load_quantplug(inputs: Inputs, quantized: Path, folder: Path, compiles: bool, *, tuned: str = "") -> Iterator[Way]:
    program, package = folder / "program.pt2", folder / "package.pt2"
    yield f"quantplug eager{tuned}", X86Program.load(program), program
    yield f"quantplug package{tuned}", _packaged(package), package
    if compiles:
        run = X86Program.load(program).compile()
        run(*inputs)
        yield f"quantplug compile{tuned}", run, None


def _build_through_openvino(case: Case, quantized: Path, folder: Path) -> None:
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        converted = _for_batch(quantized / "graph.pt2", case.inputs).module()
        program = quantplug.get_quantizer("openvino").backend.lower(converted, case.inputs, float_dtype=dtype)
        program.save(folder / f"{name}.zip")


def _load_through_openvino(inputs: Inputs, quantized: Path, folder: Path, compiles: bool) -> Iterator[Way]:
    for name, shown in (("float32", "quantplug through OpenVINO"), ("bfloat16", "the same, bf16 in float parts")):
        yield shown, OpenVINOProgram.load(folder / f"{name}.zip"), folder / f"{name}.zip"


def _build_through_onnx(case: Case, quantized: Path, folder: Path) -> None:
    converted = _for_batch(quantized / "graph.pt2", case.inputs).module()
    quantplug.get_quantizer("onnxruntime").backend.lower(converted, case.inputs).save(folder / "program.onnx")


def _load_through_onnx(
    inputs: Inputs, quantized: Path, folder: Path, compiles: bool, *, way: str = "quantplug through ONNX Runtime"
) -> Iterator[Way]:
    path = folder / "program.onnx"
    yield way, ONNXProgram.load(path), path


def _load_fastest(inputs: Inputs, quantized: Path, folder: Path, compiles: bool) -> Iterator[Way]:
    """Chooses with the threads of this process, as a user's does; a choice that is remembered is taken."""
    converted = _for_batch(quantized / "graph.pt2", inputs).module()
    program = quantplug.get_quantizer("x86").backend.lower(converted, inputs, engine="auto")
    assert program.engines is not None
    print(f"  {program.engines.summary()}")
    for row in program.engines.rows:
        print("   ", *row.cells, sep="  ", flush=True)
    yield 'quantplug, engine="auto"', program, program.save(folder / "program")


# ---- OpenVINO with its own quantizer


def _quantize_openvino(case: Case, folder: Path) -> float:
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    model = openvino.convert_model(case.model, example_input=case.calibration[0])
    batches = nncf.Dataset(case.calibration, lambda batch: [each.numpy() for each in batch])
    kind = nncf.ModelType.TRANSFORMER if case.is_transformer else None
    started = time.perf_counter()
    overflow = nncf.OverflowFix.ENABLE if kernels_saturate() else nncf.OverflowFix.DISABLE
    advanced = nncf.AdvancedQuantizationParameters(overflow_fix=overflow)
    settings = {"model_type": kind, "subset_size": len(case.calibration), "advanced_parameters": advanced}
    quantized = nncf.quantize(model, batches, **settings)
    seconds = time.perf_counter() - started
    openvino.save_model(quantized, folder / "model.xml", compress_to_fp16=False)
    return seconds


def _load_openvino(inputs: Inputs, quantized: Path, folder: Path, compiles: bool) -> Iterator[Way]:
    import openvino

    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    model = openvino.Core().read_model(quantized / "model.xml")
    model.reshape([list(each.shape) for each in inputs] if len(inputs) > 1 else list(inputs[0].shape))
    compiled = openvino.compile_model(model, "CPU", options)
    request = compiled.create_infer_request()

    def run(*given: Tensor) -> Tensor:
        results = request.infer([each.numpy() for each in given], share_inputs=True)
        return torch.from_numpy(results[compiled.outputs[0]])

    yield "OpenVINO, NNCF", run, quantized / "model.bin"


# ---- ONNX Runtime


class _Reader:
    def __init__(self, case: Case) -> None:
        self.batches = iter([{"x": batch[0].numpy()} for batch in case.calibration])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.batches, None)


def _quantize_onnx(case: Case, folder: Path) -> float:
    from onnxruntime import quantization as ort
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model: torch.nn.Module = case.model
    if isinstance(model, Bert):  # the exporter does not know the fused attention
        weights = model.state_dict()
        model = Bert("eager").eval()
        model.load_state_dict(weights)
    original, prepared = folder / "float.onnx", folder / "prepared.onnx"
    torch.backends.mha.set_fastpath_enabled(False)  # the exporter does not know the fused layers
    settings: dict[str, Any] = {"dynamo": False, "opset_version": 17, "dynamic_axes": {"x": {0: "batch"}}}
    torch.onnx.export(model, case.calibration[0], str(original), input_names=["x"], **settings)
    started = time.perf_counter()
    quant_pre_process(str(original), str(prepared), skip_symbolic_shape=True)
    kinds = {"activation_type": ort.QuantType.QUInt8, "weight_type": ort.QuantType.QInt8, "per_channel": True}
    kinds["reduce_range"] = kernels_saturate()
    ort.quantize_static(
        str(prepared), str(folder / "static.onnx"), _Reader(case), quant_format=ort.QuantFormat.QDQ, **kinds
    )
    seconds = time.perf_counter() - started
    if case.is_transformer:
        ort.quantize_dynamic(
            str(prepared),
            str(folder / "dynamic.onnx"),
            weight_type=ort.QuantType.QInt8,
            per_channel=True,
            reduce_range=kernels_saturate(),
        )
    for path in (original, prepared):
        path.unlink()
    return seconds


def _load_onnx(inputs: Inputs, quantized: Path, folder: Path, compiles: bool) -> Iterator[Way]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_free_dimension_override_by_name("batch", len(inputs[0]))
    for path in sorted(quantized.glob("*.onnx")):
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

        def run(*given: Tensor, session: Any = session) -> Tensor:
            return torch.from_numpy(session.run(None, {"x": given[0].numpy()})[0])

        yield f"ONNX Runtime, {path.stem}", run, path


ENGINES = (
    Engine("float", (), _keep_float, _nothing_more, _load_float),
    Engine("torchao", (), _quantize_torchao, _build_torchao, _load_torchao),
    Engine("quantplug", (), _quantize_quantplug, _build_quantplug, _load_quantplug),
    Engine(
        "autotuned",
        (),
        _quantize_quantplug,
        partial(_build_quantplug, autotune=True),
        partial(_load_quantplug, tuned=", autotuned"),
        "quantplug",
    ),
    Engine("onnxruntime", ("onnx", "onnxruntime"), _quantize_onnx, _nothing_more, _load_onnx),
    Engine("openvino", ("openvino", "nncf"), _quantize_openvino, _nothing_more, _load_openvino),
    Engine(
        "through_openvino",
        ("openvino",),
        _quantize_quantplug,
        _build_through_openvino,
        _load_through_openvino,
        "quantplug",
    ),
    Engine(
        "through_onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        _quantize_quantplug,
        _build_through_onnx,
        _load_through_onnx,
        "quantplug",
    ),
    Engine(
        "own_onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        partial(_quantize_quantplug, backend="onnxruntime"),
        _build_through_onnx,
        partial(_load_through_onnx, way="quantplug for ONNX Runtime"),
    ),
    Engine("auto", (), _quantize_quantplug, _nothing_more, _load_fastest, "quantplug"),
)


def build(engine: Engine, case: Case, quantized: Path, folder: Path) -> None:
    """Makes an engine's artefacts unless they are there already.

    Args:
        engine: whose.
        case: the model, and the inputs of one batch size.
        quantized: folder of what any batch shares; `seconds` in it is the time to quantize.
        folder: of what this batch needs.
    """
    if not (quantized / "seconds").is_file():
        _emptied(quantized)
        (quantized / "seconds").write_text(str(engine.quantize(case, quantized)))
    if not (folder / "built").is_file():
        _emptied(folder)
        engine.build(case, quantized, folder)
        (folder / "built").touch()


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
