"""What is asked of a random model: that it runs, thrice, and computes what its graph and its float form compute."""

import contextlib
import copy
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import quantplug
from fuzz.model import Model
from quantplug.core.errors import QuantplugError
from quantplug.core.qdq.nodes import is_quantize
from quantplug.core.report.compare import compare_layers
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.x86 import X86Program
from quantplug.lowering.xnnpack import XNNPACKProgram
from quantplug.lowering.xnnpack.runtime import Method

CALLS = 3
# Decibels that a program keeps of its graph, unless the graph does not keep them of itself.
_KEPT = {"x86": 35.0, "xnnpack": 25.0, "openvino": 25.0, "cortex_m": 25.0}
# Backends whose compilers fold operators into others, so that what runs in integers is not known of each.
_FOLDING = ("openvino",)
# Backends whose averages have the scale of what they read, which is coarse for the mean of numbers of both signs.
_SHARING = ("cortex_m",)
_SHARE = 2.0**-6
_MARGIN = 3.0
_TORCH = 60.0  # decibels that torch's two sets of float kernels keep of each other
# A graph this far from torchao's of the same model is worse, not only another, unless the float model loses as much
# where its products are that noisy. Of many batches, as a sum of few large products is rounded well or badly by chance.
_WORSE, _BATCHES = 6.0, 16
_NOISE = {True: 15.0, False: 30.0}  # decibels of a product of 4 bits, and of 8
_PRODUCTS = ("conv1d", "conv2d", "conv3d", "linear", "addmm", "mm")
_FOREIGN = re.compile(
    r"\b(?!Quantplug)[A-Z]\w*(Error|Exception)\b:|report the model|does not load the program"
    r"|dB of the q/dq graph|Traceback"
)


@dataclass(frozen=True)
class Verdict:
    """What became of a model: "passed", "refused", "hard" (far from float for torchao too), "unfit" or "suspect"."""

    seed: int
    outcome: str
    told: str = ""
    steps: int = 0
    kept: float = float("inf")
    quality: float = float("inf")

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def kind(self) -> str:
        """The text without what differs between models of one kind."""
        return re.sub(
            r"'[^']*'|[-+]?\d[\d.e+-]*|\([^()]*\)|\[[^\]]*\]", "_", self.told.splitlines()[0] if self.told else ""
        )[:160]


class SuspicionError(Exception):
    """The model breaks a promise."""


def judged(model: Model, backend: str, saves: bool = True) -> Verdict:
    """Takes a model through export, quantization and three calls.

    Args:
        model: the random model.
        backend: the name of a backend.
        saves: whether the artefact is saved, loaded and called again.
    """
    torch.set_num_threads(1)
    seed, steps = model.seed, len(model.steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exported = _exported(model)
        except Exception as error:
            return Verdict(seed, "unfit", _line(error), steps)
        try:
            return _checked(model, exported, backend, saves)
        except SuspicionError as found:
            return Verdict(seed, "suspect", f"{found}", steps)
        except QuantplugError as error:
            return Verdict(seed, *_refusal(error), steps)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Verdict(seed, "suspect", f"{_line(error)} at {Path(where.filename).name}:{where.lineno}", steps)


def _exported(model: Model) -> fx.GraphModule:
    module, inputs = model.module(), model.batch(0)
    module(*copy.deepcopy(inputs))
    module = model.module()
    return torch.export.export(module, inputs, dynamic_shapes=model.open_sizes(), strict=model.strict).module()


def _refusal(error: QuantplugError) -> tuple[str, str]:
    told = f"{type(error).__name__}: {error}"
    sentence = str(error)
    if "\n" in sentence or not sentence.endswith(".") or len(sentence) > 700 or _FOREIGN.search(sentence):
        return "suspect", f"no clean refusal: {told}"
    return "refused", told


def _checked(model: Model, exported: fx.GraphModule, backend: str, saves: bool) -> Verdict:
    batches = [model.batch(number) for number in range(CALLS)]
    floats = _called(copy.deepcopy(exported), batches)
    if not all(leaf.isfinite().all() for leaf in _leaves(floats)):
        return Verdict(model.seed, "unfit", "its float form is not finite", len(model.steps))
    with torch.backends.mkldnn.flags(enabled=False):
        plain = _called(copy.deepcopy(exported), batches)
    if min(_qualities(plain, floats)) < _TORCH:
        return Verdict(model.seed, "unfit", "torch's own kernels disagree about its float form", len(model.steps))
    artefact = _quantized(model, copy.deepcopy(exported), backend)
    reference, unused = copy.deepcopy(artefact.reference), copy.deepcopy(artefact.reference)
    own = [_called(_Unsettled(copy.deepcopy(reference), seed).run, batches) for seed in range(2)]
    expected = _called(reference, batches)
    quality = min(_qualities(expected, floats))
    loaded = _loaded(artefact.program, backend) if saves else None
    found = _called(artefact, batches)
    again = _called(artefact.reference, batches)
    kept = _agree(found, expected, own, _KEPT[backend], "the artefact and its graph")
    _agree(again, expected, own, 60.0, "the reference behind and before the artefact's calls")
    if loaded is not None:
        _agree(_flat(_called(loaded, batches)), _flat(found), own, 60.0, "the saved file and the artefact")
    if model.config == "int8" and backend not in _FOLDING:
        _require_integers(artefact)
    return _against_float(model, exported, backend, quality, unused, kept)


def _quantized(model: Model, exported: fx.GraphModule, backend: str) -> quantplug.Artefact:
    calibration = [model.batch(number) for number in range(3)]
    return quantplug.quantize(
        exported,
        model.batch(0),
        backend,
        calibration,
        model.config,
        dynamic_shapes=model.open_sizes(),
        progress=False,
    )


def _called(run: Callable[..., Any], batches: list[tuple[Tensor, ...]]) -> list[Any]:
    """Returns what calls in a row return; a later call may not change what an earlier one gave."""
    with torch.no_grad():
        return [pytree.tree_map_only(Tensor, torch.clone, run(*(x.clone() for x in batch))) for batch in batches]


def _leaves(results: list[Any]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]


def _flat(results: list[Any]) -> list[list[Tensor]]:
    return [_leaves([each]) for each in results]


def _agree(found: list[Any], expected: list[Any], own: list[list[Any]], floor: float, who: str) -> float:
    """Returns the fewest decibels between two runs, which the graph's own sensitivity may lower."""
    worst = float("inf")
    if pytree.tree_structure(found) != pytree.tree_structure(expected):
        raise SuspicionError(f"{who} differ in structure")
    for call, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        moved = [_leaves([run[call]]) for run in own]
        for index, (a, b) in enumerate(zip(_leaves([ours]), _leaves([theirs]), strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise SuspicionError(f"{who} differ in form: {tuple(a.shape)} {a.dtype}, {tuple(b.shape)} {b.dtype}")
            ratio, limit = _ratio(a, b), min(floor, *(_ratio(run[index], b) - _MARGIN for run in moved))
            if not ratio >= limit:
                raise SuspicionError(
                    f"{who} differ: {ratio:.1f} dB, {limit:.1f} wanted, in output {index} of call {call}"
                )
            worst = min(worst, ratio)
    return worst


def _ratio(a: Tensor, b: Tensor) -> float:
    if not a.is_floating_point() or torch.allclose(a, b, 1e-5, 1e-6, equal_nan=True):
        return float("inf")
    return sqnr(a, b)


def _loaded(program: Any, backend: str) -> Callable[..., Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(program, X86Program):
            return X86Program.load(program.save(Path(folder) / "m.pt2"))
        if isinstance(program, XNNPACKProgram):
            return _pte(program.save(Path(folder) / "m.pte").read_bytes())
    return None


def _pte(content: bytes) -> Callable[..., Any]:
    method = Method(content, None)
    return lambda *inputs: method([each.contiguous() for each in inputs])


def _require_integers(artefact: quantplug.Artefact) -> None:
    """Holds what the report says of products against where the program runs them."""
    placed = {each.node: each for each in artefact.program.ops}
    for row in artefact.report.rows:
        operator = placed.get(row.node)
        if not row.quantized or operator is None or row.operator.split(".")[0] not in _PRODUCTS:
            continue
        if operator.placement != "int8":
            told = f"runs it as {operator.placement} ({operator.reason})"
            raise SuspicionError(f"the report calls '{row.node}' {row.how}, the program {told}")


def _against_float(
    model: Model, exported: fx.GraphModule, backend: str, quality: float, reference: fx.GraphModule, kept: float
) -> Verdict:
    steps = len(model.steps)
    floor = max(8.0, 25.0 - 0.5 * steps) - (12.0 if "int4" in model.config else 0.0)
    if quality >= floor:
        return Verdict(model.seed, "passed", "", steps, kept, quality)
    batches = [model.batch(number) for number in range(_BATCHES)]
    floats = _called(copy.deepcopy(exported), batches)
    ours = _mean(_qualities(_called(reference, batches), floats))
    shaken = _mean(_qualities(_called(_Shaken(copy.deepcopy(exported), model).run, batches), floats))
    theirs = _torchao(model, exported, backend, batches)
    other = shaken if theirs is None else _mean(_qualities(theirs, floats))
    told = f"{quality:.1f} dB from float, of {_BATCHES} batches {ours:.1f}, shaken {shaken:.1f}, torchao {other:.1f}"
    if min(other, shaken) - ours > _WORSE and not (backend in _SHARING and _averages(reference)):
        raise SuspicionError(told)
    return Verdict(model.seed, "hard", told, steps, kept, quality)


def _averages(graph: fx.GraphModule) -> bool:
    return any("avg_pool" in str(node.target) for node in graph.graph.nodes)


def _qualities(found: list[Any], floats: list[Any]) -> list[float]:
    """Returns for each call the decibels from float of its worst output."""
    return [
        min((_ratio(a, b) for a, b in zip(_leaves([one]), _leaves([other]), strict=True)), default=float("inf"))
        for one, other in zip(found, floats, strict=True)
    ]


def _mean(decibels: list[float]) -> float:
    """Returns the mean of what lies within 0 and 100: an output that is all zeros in float has -inf or inf."""
    return sum(min(max(each, 0.0), 100.0) for each in decibels) / len(decibels)


def _torchao(model: Model, exported: fx.GraphModule, backend: str, batches: list[Any]) -> list[Any] | None:
    """Returns what the peer's quantizer of the same kernels computes, by torchao's flow, or by ours where that fails.

    None where ours fails too: the quantizer itself does.
    """
    from torchao.quantization.pt2e import quantize_pt2e as peer

    for flow in (peer, quantplug):
        with contextlib.suppress(Exception):
            prepared = flow.prepare_pt2e(_without_guards(exported), _peer(backend, "dynamic" in model.config))
            for number in range(3):
                prepared(*model.batch(number))
            return _called(flow.convert_pt2e(prepared), batches)
    return None


def _without_guards(exported: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy without export's checks of inputs, a module that ExecuTorch's passes do not take."""
    module = copy.deepcopy(exported)
    for node in module.graph.find_nodes(op="call_module"):
        module.graph.erase_node(node)
    module.recompile()
    return module


def _peer(backend: str, is_dynamic: bool) -> Any:
    if backend == "xnnpack":
        from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack

        config = xnnpack.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=is_dynamic)
        return xnnpack.XNNPACKQuantizer().set_global(config)
    if backend == "cortex_m":
        from executorch.backends.cortex_m.quantizer.quantizer import CortexMQuantizer

        return CortexMQuantizer()
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    return x86.X86InductorQuantizer().set_global(
        x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic)
    )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


class _Unsettled(fx.Interpreter):
    """Runs a q/dq graph of which a few integers are one step beside."""

    def __init__(self, module: fx.GraphModule, seed: int) -> None:
        super().__init__(module)
        self._generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if not is_quantize(n):
            return value
        moved = torch.rand(value.shape, generator=self._generator) < _SHARE
        return torch.where(moved & (value < torch.iinfo(value.dtype).max), value + 1, value)


class _Shaken(fx.Interpreter):
    """Runs a float graph whose products are as noisy as roundings make them."""

    def __init__(self, module: fx.GraphModule, model: Model) -> None:
        super().__init__(module)
        self._generator = torch.Generator().manual_seed(model.seed)
        self._noise = 10 ** (-_NOISE["int4" in model.config] / 20)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if not str(n.target).removeprefix("aten.").startswith(_PRODUCTS) or not value.numel():
            return value
        noise = torch.randn(value.shape, generator=self._generator)
        return value + noise * value.square().mean().sqrt() * self._noise


def parting(model: Model, backend: str) -> Iterator[str]:
    """Yields, for each operator of the graph, how far its value is from float: where the numbers part."""
    exported = _exported(model)
    artefact = _quantized(model, copy.deepcopy(exported), backend)
    yield str(artefact.report)
    yield str(artefact.reference.graph)
    for name, pair in compare_layers(exported, copy.deepcopy(artefact.reference), model.batch(0)).items():
        yield f"{name}: {_ratio(pair[1], pair[0]):.1f} dB of float"
    for operator in artefact.program.ops:
        yield str(operator)
