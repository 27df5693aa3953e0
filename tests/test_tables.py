"""The tables of the documentation name models; each of them is lowered, run, compared and explained here.

Small images, few layers and random weights: a figure may go stale, a row whose model does not lower any more may not.
"""

import itertools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import xnnpack_models
from extras import torchvision_models, transformers_module
from models import settled
from told import told
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.core.specs.levels import sqnr

ROOT = Path(__file__).parent.parent
# First headers of tables that name no models, and of "observer" and "weights", whose figures are of calibration alone.
WITHOUT_MODELS = {
    *(
        "what",
        "operator",
        "operators",
        "rule",
        "kernel",
        "config",
        "rounding",
        "cost",
        "rewrite",
        "option",
        "name",
        "setter",
        "family",
        "check",
        "engine",
        "program",  # test_generation.py has the language model and its program
        "way",
        "",
        "architecture",  # test_architectures.py has those
        "checkpoint",  # tests/language/test_memory.py has smaller ones
    ),
    *("what", "column", "observer", "weights", "fault", "File", "id", "word", "our word"),
    *("what you want", "you", "backend", "format", "observer in the config", "framework", "where", "kind", "quantizer"),
}
BACKENDS = {"XNNPACK": "xnnpack", "x86": "x86"}


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yields the tables of a page as rows of cells, the header first."""
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        if len(rows) > 1 and set("".join(rows[1])) <= set("-: "):
            yield [rows[0], *rows[2:]]


def plain(cell: str) -> str:
    """Returns a cell without the number of its footnote."""
    return re.sub(r" \(\d\)$", "", cell)


def named(page: str, table: list[list[str]]) -> set[tuple[str, str]]:
    """Returns which models a table names, each with the backend that it stands for."""
    header, *rows = table
    if header[:3] == ["model", "backend", "config"]:
        return {(row[1], f"{row[0]}, {row[2]}") for row in rows if not row[2].endswith("'s")}
    if header[0] == "model":
        return {(page, plain(row[0])) for row in rows}
    if header[0] == "engine":
        engines = " ".join(row[0] for row in rows)
        backends = ["x86", *(["openvino"] if "OpenVINO" in engines else [])]
        return {(backend, name) for backend in backends for name in header[1:]}
    if header[0] == "activations / weights" and "," in header[1]:
        return {(BACKENDS[kind], name) for name, kind in (cell.split(", ") for cell in header[1:])}
    if header[:2] == ["activations / weights", "model"]:
        return {(backend, row[1]) for row in rows if row[1] for backend in BACKENDS.values()}
    assert header[0] in WITHOUT_MODELS, f"docs/{page}.md: which models does the table with header {header} name?"
    return set()


def every_model() -> set[tuple[str, str]]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {found for page in pages for table in tables(page.read_text()) for found in named(page.stem, table)}


class Residual(nn.Module):
    """Two convolutions beside a shortcut, as in the ResNets for images of 32 x 32."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.stride, self.width = width // given if given != width else 1, width
        self.first, self.second = (
            nn.Conv2d(a, width, 3, s, 1, bias=False) for a, s in ((given, self.stride), (width, 1))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.width - x.shape[1]))
        return F.relu(y + short)


def small_resnet(blocks):
    widths = [16] * (blocks + 1) + [32] * blocks + [64] * blocks
    body = [Residual(a, b) for a, b in itertools.pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return with_statistics(model, (3, 32, 32))


def keyword_spotter():
    def unit(*layers):
        return [part for layer in layers for part in (layer, nn.BatchNorm2d(64), nn.ReLU())]

    separable = [part for _ in range(4) for part in unit(nn.Conv2d(64, 64, 3, 1, 1, groups=64), nn.Conv2d(64, 64, 1))]
    stem = unit(nn.Conv2d(1, 64, (10, 4), 2, (5, 1)))
    model = nn.Sequential(*stem, *separable, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 12))
    return with_statistics(model, (1, 49, 10))


def with_statistics(model, shape):
    return settled(model, torch.randn(4, *shape)), lambda: (torch.randn(1, *shape),)


FEW_BLOCKS = {
    "densenet121": lambda models: models.DenseNet(8, (2, 2), 16),
    "swin_t": lambda models: models.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [7, 7]),
    "convnext_tiny": lambda models: models.ConvNeXt(
        [models.convnext.CNBlockConfig(32, 64, 2), models.convnext.CNBlockConfig(64, None, 2)]
    ),
}


def few_blocks(name):
    """A network of many equal blocks with a few of them; the whole ones take minutes each."""
    models, sample = torchvision_models(), xnnpack_models.images(64)
    torch.manual_seed(0)
    return xnnpack_models.with_statistics(FEW_BLOCKS[name](models), sample), sample


def of_the_benchmark(name):
    """A model of the XNNPACK benchmark, its images of 64 x 64."""
    if name in FEW_BLOCKS:
        model, sample = few_blocks(name)
        seeds = iter(range(1000))
        return model, lambda: sample(next(seeds))
    if name not in ("LSTM", "GRU"):
        (transformers_module if name.startswith("bert") else torchvision_models)()
    model, sample = xnnpack_models.make(name, 64, seed=0)
    seeds = iter(range(1000))
    return model, lambda: sample(next(seeds))


def vit_b_16():
    torchvision_models()
    model = torchvision_models().VisionTransformer(64, 16, 2, 12, 768, 3072)
    nn.init.trunc_normal_(model.heads.head.weight, std=0.02)  # zero as it is made
    return model.eval(), lambda: (torch.randn(1, 3, 64, 64),)


def bert():
    transformers_module()
    model = xnnpack_models.language("Bert", num_hidden_layers=2).eval()
    return model, lambda: (torch.randint(xnnpack_models.VOCABULARY, (1, 32)),)


def llama():
    transformers_module()
    sizes = {"num_hidden_layers": 2, "hidden_size": 192, "intermediate_size": 512}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    model = xnnpack_models.language("Llama", **sizes, **heads).eval()
    return model, lambda: (torch.randint(xnnpack_models.VOCABULARY, (1, 32)),)


def mlp():
    layers = nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)
    return nn.Sequential(*layers).eval(), lambda: (torch.randn(1, 1024),)


def transformer_layer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True)
    return nn.Sequential(layer, nn.Linear(32, 10)).eval(), lambda: (torch.randn(1, 16, 32),)


IMAGES = ("resnet18", "mobilenet_v2", "mobilenet_v3_small")
SPELLED = {
    "vit_b_16 of 4 layers": "vit",
    "BERT of 4 layers, static": "bert",
    "BERT of 4 layers, dynamic": "bert_dynamic",
}
PEOPLE = {
    "kws_dscnn": keyword_spotter,
    "resnet20": lambda: small_resnet(3),
    "resnet32": lambda: small_resnet(5),
}
X86 = {
    **{name: partial(of_the_benchmark, name) for name in (*IMAGES, "resnet50")},
    "vit_b_16": vit_b_16,
    "bert": bert,
    "mlp": mlp,
}
LANGUAGE = {"MiniLM-L6": bert, "SmolLM2-135M": llama}
LANGUAGE_CONFIGS = {
    "xnnpack": ("int8", "int8_dynamic", "int4_dynamic_groups"),
    "x86": ("int8", "int8_dynamic", "int4_weight_only"),
}
# (backend, the name in the table) -> builder of the model and of its inputs
CASES = {
    **{
        ("xnnpack", spelling): partial(of_the_benchmark, name)
        for name in xnnpack_models.TABLE
        for spelling in [next((s for s, given in SPELLED.items() if given == name), name)]
    },
    **{(backend, name): build for backend in BACKENDS.values() for name, build in PEOPLE.items()},
    ("arm", "mobilenet_v2"): partial(of_the_benchmark, "mobilenet_v2"),
    ("arm", "kws_dscnn"): keyword_spotter,
    ("arm", "transformer"): transformer_layer,
    **{(backend, name): build for backend in ("x86", "openvino") for name, build in X86.items()},
    ("x86", "encoder"): transformer_layer,
    **{
        ("xnnpack", f"{name}, {config}"): partial(of_the_benchmark, name)
        for name, config in (
            ("resnet18", "int8_weight_only"),
            ("resnet18", "float16"),
            ("mobilenet_v2", "int8_weight_only"),
            ("mobilenet_v2", "float16"),
        )
    },
    **{
        (backend, f"{name}, {config}"): build
        for name, build in LANGUAGE.items()
        for backend, configs in LANGUAGE_CONFIGS.items()
        for config in configs
    },
}
QUICK = {("x86", "kws_dscnn"), ("openvino", "mlp")}


def test_every_model_of_a_table_has_a_case():
    assert every_model() == set(CASES)


@pytest.mark.parametrize(
    ("backend", "name"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_a_model_of_a_table_lowers_runs_and_agrees(backend, name):
    model, sample = CASES[backend, name]()
    named_config = name.rpartition(", ")[2]
    config = {"dynamic": "int8_dynamic"}.get(named_config, named_config)
    config = config if config in quantplug.get_quantizer(backend).backend.configs else "int8"
    data = [sample() for _ in range(4)]
    artefact = quantplug.quantize(model, data[0], backend, data, config, progress=False)
    fresh = [sample() for _ in range(3)]
    with torch.no_grad():
        found, expected, true = (
            torch.cat([each(*inputs).flatten() for inputs in fresh]) for each in (artefact, artefact.reference, model)
        )
    kernels, theirs, ours = sqnr(found, expected), sqnr(expected, true), sqnr(found, true)
    print(f"{kernels:.1f} dB to the q/dq graph, which is {theirs:.1f} dB from float; the program {ours:.1f} dB")
    assert theirs > 10
    assert kernels > 30 or (kernels > 25 and ours > theirs - 1)
    of_weights = quantplug.get_quantizer(backend).backend.config(config).input_activation is None
    # OpenVINO chooses kernels itself, and so does x86 where weights alone are quantized.
    if backend == "xnnpack" or (backend == "x86" and not of_weights):
        report, program = told(artefact)
        assert report == program
