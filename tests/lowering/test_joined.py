"""Models whose modules run on several engines: one program, one file, and what the q/dq graph computes."""

import json
import warnings
import zipfile
from typing import Any

import pytest
import stateful_models
import torch
from models import BasicBlock, exported, reference, settled
from torch import nn
from torch.utils import _pytree as pytree

import quantplug
from quantplug import JoinedProgram, OpenVINOProgram, Region, X86Program
from quantplug.core.errors import ArtefactError, ConfigError, LoweringError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.starting import starting
from quantplug.quantizers.framework.engines import Engine
from quantplug.quantizers.x86 import X86

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PLANTED = {name: Engine(f"planted_engines:{name}") for name in ("honest", "slow", "wrong", "refusing")}
BACKEND = quantplug.derive(X86, "planted", engines={"other": Engine("quantplug.lowering.x86:lower"), **PLANTED})


class Net(nn.Module):
    """A backbone with a residual block, whose features are returned beside what the head makes of them."""

    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), BasicBlock(8, 8, 1)
        self.neck, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        features = self.block(self.stem(x))
        pooled = torch.flatten(nn.functional.adaptive_avg_pool2d(self.neck(features) + features, 1), 1)
        return {"classes": self.head(pooled), "features": features}


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    return reference(settled(Net(), torch.randn(8, 3, 8, 8)), quantplug.get_quantizer("x86"), X)


def agrees(program, expected, *inputs, decibels=40):
    pairs = zip(pytree.tree_leaves(program(*inputs)), pytree.tree_leaves(expected), strict=True)
    return all(sqnr(*pair) > decibels for pair in pairs)


def test_backbone_on_one_engine_and_head_on_another_are_one_artefact(tmp_path):
    torch.manual_seed(0)
    model = settled(Net(), torch.randn(8, 3, 8, 8))
    artefact = quantplug.quantize(model, (X,), "x86", [X], engine={"": "openvino", "head": "onednn"}, progress=False)
    assert isinstance(artefact.program, JoinedProgram)
    kinds = [type(part.program) for part in artefact.program.parts]
    assert kinds == [OpenVINOProgram, X86Program]
    for data in (X, -X):
        found, expected = artefact(data), artefact.reference(data)
        assert list(found) == ["classes", "features"]
        assert agrees(artefact, expected, data)
    engines = {op.module_path: op.how for op in artefact.program.ops}
    assert engines["neck"] == "on engine 'openvino'"
    assert engines["head"] == "on engine 'onednn'"
    assert all(
        op.placement == "int8" for op in artefact.program.ops if op.target.startswith(("aten.conv", "aten.linear"))
    )
    head: Any = artefact.program.parts[1].program
    assert [leaf.dtype for leaf in head.example_inputs] == [torch.uint8]  # integers pass, not floats
    loaded = JoinedProgram.load(artefact.save(tmp_path / "model.zip"))
    for data in (X, -X):
        assert torch.equal(loaded(data)["classes"], artefact(data)["classes"])
    assert artefact.nbytes == pytest.approx((tmp_path / "model.zip").stat().st_size, rel=0.01)
    with pytest.raises(LoweringError, match="Input 0 of the program"):
        loaded(X[:1])


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("asked", "engines"),
    [
        ({"": "other", "block": "honest"}, ["other", "honest", "other"]),
        ({"": "other", "block": "honest", "block.conv2": "other"}, None),
        ({"": "other", "neck": "honest"}, ["other", "honest", "other"]),
        ({"": "other", "*.conv?": "honest"}, None),
        ({"": "honest"}, ["honest"]),
    ],
    ids=str,
)
def test_a_graph_is_cut_wherever_the_engine_changes(graph, asked, engines):
    with warnings.catch_warnings():
        warnings.simplefilter("error", quantplug.QuantplugWarning)
        program = BACKEND.lower(graph, (X,), engine=asked)
    found = [part.engine for part in program.parts] if isinstance(program, JoinedProgram) else []
    assert found == engines if engines else len(found) > 3
    for data in (X, 2 * X):
        assert agrees(program, graph(data), data)


def test_a_piece_that_computes_something_else_is_refused(graph):
    with pytest.raises(LoweringError, match="dB of the q/dq graph"):
        BACKEND.lower(graph, (X,), engine={"": "honest", "head": "wrong"})
    with pytest.raises(LoweringError, match="This engine has no convolutions"):
        BACKEND.lower(graph, (X,), engine={"": "honest", "stem": "refusing"})


def test_open_sizes_and_ranges_of_run_time():
    torch.manual_seed(0)
    model = settled(Net(), torch.randn(8, 3, 8, 8))
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    artefact = quantplug.quantize(
        model, (X,), "x86", config="int8_dynamic", dynamic_shapes=(batch,), engine={"": "onednn", "head": "onednn"},
        progress=False,
    )  # fmt: skip
    more = torch.randn(5, 3, 8, 8)
    assert agrees(artefact, artefact.reference(more), more)


def test_quantizers_of_a_composition_with_an_engine_each():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval()
    quantizer = (
        quantplug.ComposableQuantizer()
        .add(quantplug.get_quantizer("x86"), Region(module="3"), precedence=1)
        .add(quantplug.get_quantizer("openvino"), precedence=0)
    )
    engine = {"": "other", "3": "honest"}
    converted = quantplug.prepare_pt2e(exported(model, X), quantizer)
    quantplug.calibrate(converted, [X], progress=False)
    converted = quantplug.convert_pt2e(converted)
    program = BACKEND.lower(converted, (X,), engine=engine)
    assert isinstance(program, JoinedProgram)
    assert [part.engine for part in program.parts] == ["other", "honest"]
    assert sqnr(program(2 * X), converted(2 * X)) > 40


class TwoReaders(nn.Module):
    """A cache that one module writes and another one reads."""

    def __init__(self):
        super().__init__()
        self.slots, self.head = stateful_models.Slots(), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.slots(x))


class After(TwoReaders):
    def forward(self, x):
        return self.head(self.slots(x)) + self.slots.keys.sum()


class Before(TwoReaders):
    def forward(self, x):
        before = self.slots.keys.sum()
        return self.head(self.slots(x)) + before


@pytest.mark.parametrize("kind", [TwoReaders, After])
def test_a_state_stays_in_its_piece(kind):
    first, *more = stateful_models.calls(4)
    torch.manual_seed(0)
    converted = reference(kind().eval(), quantplug.get_quantizer("x86"), first)
    program = BACKEND.lower(converted, (first,), engine={"": "other", "slots": "honest"})
    for _ in range(2):
        expected = starting(converted)
        for x in (first, *more):
            assert sqnr(program(x), expected(x)) > 25
        program.restart()


def test_a_state_that_two_pieces_share_is_refused():
    (first,) = stateful_models.calls(1)
    converted = reference(Before().eval(), quantplug.get_quantizer("x86"), first)
    with pytest.raises(LoweringError, match=r"Buffer 'slots.keys' is written .*give all that read it one engine"):
        BACKEND.lower(converted, (first,), engine={"": "other", "slots": "honest"})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"": "other", "hed": "honest"}, r"matches nothing in the model \(the nearest names are \['head'"),
        ({"head": "honest"}, "No engine is asked for .*add one for ''"),
        ({"": "other", "head": "onest"}, r"no engine 'onest' \(did you mean 'honest'\?\)"),
        ({"": "auto"}, "no engine 'auto'"),
        ({}, "no engine 'nothing'"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_sentence(graph, asked, said):
    with pytest.raises(ConfigError, match=said):
        BACKEND.lower(graph, (X,), engine=asked)


def test_files_that_are_none(graph, tmp_path):
    program, path = BACKEND.lower(graph, (X,), engine={"": "other", "head": "honest"}), tmp_path / "model.zip"
    program.save(path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    settings: dict[str, Any] = json.loads(records["joined.json"])
    changed: list[dict[str, Any]] = [
        {"version": 2},
        {"parts": [{**settings["parts"][0], "kind": "Popen"}]},
        {"parts": [{**settings["parts"][0], "takes": [4]}]},
        {"more": 1},
    ]
    for change, said in zip(changed, ("version 2", "'Popen'", "value 4 of 1", "'more'"), strict=True):
        with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
            for name, content in records.items():
                is_told = name == "joined.json"
                archive.writestr(name, json.dumps({**settings, **change}) if is_told else content)
        with pytest.raises(ArtefactError, match=f"no program of several engines .*{said}"):
            JoinedProgram.load(tmp_path / "other.zip")
    (tmp_path / "text.zip").write_text("no archive")
    for name in ("text.zip", "absent.zip"):
        with pytest.raises(ArtefactError, match=r"pass a (file|program) that `JoinedProgram.save` wrote"):
            JoinedProgram.load(tmp_path / name)
    unread = BACKEND.lower(graph, (X,), engine={"": "other", "head": "slow"})
    with pytest.raises(ArtefactError, match="Programs of engine 'slow' are not read again"):
        unread.save(tmp_path / "never.zip")
    assert not (tmp_path / "never.zip").exists()
