"""Whether a change of the code changed what it does: q/dq graphs, operators of programs and outputs of two versions.

`python benchmarks/behaviour.py record FOLDER` writes what the installed quantplug makes of every case into a folder,
`python benchmarks/behaviour.py compare BEFORE AFTER` says which cases differ and in what, and fails if any does. A case
is a model, a backend and a config: every model in each backend's default, and a few models in every config (`--all`:
every model in every config). Run each version in the same environment with one thread: outputs are compared bit by bit.
"""

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xnnpack_models
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import quantplug
from quantplug.core.specs.levels import sqnr

BACKENDS = ("xnnpack", "x86", "openvino", "cortex_m", "tensorrt")
VISION = (
    *(name for name in xnnpack_models.TABLE if name not in ("bert_dynamic",)),
    *("alexnet", "vgg11_bn", "squeezenet1_1", "googlenet", "mnasnet0_5", "regnet_y_400mf", "mobilenet_v3_large"),
    *("resnext50_32x4d", "wide_resnet50_2", "lraspp_mobilenet_v3_large", "efficientnet_v2_s", "RNN"),
)
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LANGUAGE = {
    "DistilBert": {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "Albert": {**SMALL, "embedding_size": 32},
    "Electra": {**SMALL, "embedding_size": 32},
    "Roberta": SMALL,
    "Llama": {**SMALL, "num_key_value_heads": 2},
    "Qwen2": {**SMALL, "num_key_value_heads": 2},
}
MODELS = (*VISION, *LANGUAGE)
IN_EVERY_CONFIG = ("mobilenet_v3_small", "shufflenet_v2_x0_5", "LSTM", "Llama", "Roberta")
BATCHES = 2


def build(name: str) -> tuple[torch.nn.Module, xnnpack_models.Sample]:
    """Returns a model of the list, its images of 64 x 64, and the maker of its inputs."""
    if name not in LANGUAGE:
        return xnnpack_models.make(name, 64, seed=0)
    torch.manual_seed(0)
    return xnnpack_models.language(name, **LANGUAGE[name]).eval(), xnnpack_models.tokens(16)


def cases(everything: bool) -> Iterator[tuple[str, str, str]]:
    """Yields (model, backend, config)."""
    for model, backend in itertools.product(MODELS, BACKENDS):
        declared = quantplug.get_quantizer(backend).backend
        for config in declared.configs:
            if everything or model in IN_EVERY_CONFIG or config == next(iter(declared.configs)):
                yield model, backend, config


def graph_lines(graph_module: fx.GraphModule) -> list[str]:
    """Returns a graph as text: operators and arguments, nodes by their places, constants by their sums."""
    places = {node: f"%{place}" for place, node in enumerate(graph_module.graph.nodes)}

    def spelled(value: Any) -> Any:
        return places[value] if isinstance(value, fx.Node) else value

    lines = []
    for node in graph_module.graph.nodes:
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), spelled)
        target = str(node.target) if callable(node.target) else constant(graph_module, node)
        lines.append(f"{places[node]} = {node.op} {target} {args} {kwargs}")
    return lines


def constant(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """Returns what a node without an operator stands for."""
    if node.op != "get_attr":
        return node.op
    value: Any = graph_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} {tuple(value.shape)} {value.double().nan_to_num().sum().item():.17g}"


def observe(model: torch.nn.Module, sample: xnnpack_models.Sample, backend: str, config: str) -> dict[str, Any]:
    """Returns what quantplug makes of a case, or the error that it raises."""
    data = [sample(seed) for seed in range(BATCHES)]
    declared = quantplug.get_quantizer(backend).backend
    needs_data = quantplug.get_quantizer(backend).set_global(config).needs_calibration
    try:
        artefact = quantplug.quantize(
            model, data[0], declared.name, data if needs_data else None, config, progress=False
        )
        calls = [pytree.tree_leaves(artefact(*sample(seed))) for seed in (7, 8)]
    except quantplug.QuantplugError as error:
        return {"error": str(error)}
    return {
        "graph": graph_lines(artefact.reference),
        "report": [(row.operator, row.rule, row.how, row.reason) for row in artefact.report.rows],
        "operators": [(op.target, op.placement, op.reason) for op in artefact.program.ops],
        "outputs": [leaf for leaves in calls for leaf in leaves if isinstance(leaf, Tensor)],
    }


def record(folder: Path, everything: bool, only: list[str]) -> None:
    """Writes a file for each case that the folder has none of."""
    folder.mkdir(parents=True, exist_ok=True)
    built: dict[str, tuple[Any, Any]] = {}
    for model, backend, config in cases(everything):
        path = folder / f"{model},{backend},{config}.pt"
        if path.exists() or (only and not {model, backend, config} & set(only)):
            continue
        if model not in built:
            built = {model: build(model)}
        torch.save(observe(*built[model], backend, config), path)
        print(path.stem, flush=True)


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Returns in what two observations differ, "" for nothing."""
    for part in ("error", "graph", "report", "operators"):
        pairs = itertools.zip_longest(_listed(before.get(part)), _listed(after.get(part)))
        changed = next(((a, b) for a, b in pairs if a != b), None)
        if changed is not None:
            return f"{part}: {changed[0]} -> {changed[1]}"
    for a, b in zip(before.get("outputs", []), after.get("outputs", []), strict=True):
        if not torch.equal(a.nan_to_num(), b.nan_to_num()):
            return f"outputs: {float(sqnr(b.double(), a.double())):.1f} dB"
    return ""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def compare(before: Path, after: Path) -> int:
    """Prints the cases that differ; returns how many they are."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.pt")})
    load: Callable[[Path], dict[str, Any]] = lambda path: torch.load(path) if path.exists() else {"error": "missing"}  # noqa: E731
    found = {name[:-3]: difference(load(before / name), load(after / name)) for name in names}
    for name, text in found.items():
        if text:
            print(f"{name}: {text}")
    differing = sum(map(bool, found.values()))
    print(f"{len(names)} cases, {differing} differ")
    return differing


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write what quantplug makes of every case")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--all", action="store_true", help="every model in every config")
    recording.add_argument("--only", nargs="*", default=[], help="models, backends or configs")
    comparing = commands.add_parser("compare", help="say which cases differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.command == "record":
        record(given.folder, given.all, given.only)
        return 0
    return min(compare(given.before, given.after), 1)


if __name__ == "__main__":
    sys.exit(main())
