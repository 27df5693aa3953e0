"""Compiled packages: files that are read again, on processors like theirs, by those who trust them."""

import io
import json
import logging
import zipfile

import pytest
import torch
from models import reference
from torch import nn

import quantplug
from quantplug import JoinedProgram, X86Package, X86Program
from quantplug.core.errors import ArtefactError, LoweringError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering import processor

pytestmark = pytest.mark.slow
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers, the second of which may run elsewhere; takes a number by name and returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)

    def forward(self, x, *, scale):
        features = self.body(x)
        return {"classes": self.head(features) * scale, "features": [features]}


@pytest.fixture(scope="module")
def artefact():
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX", raising=False)
        return quantplug.quantize(
            Net().eval(), (X,), "x86", [{"x": X, "scale": X[:1, :1]}], example_kwargs={"scale": X[:1, :1]},
            engine={"": "onednn", "head": "onednn_package"}, progress=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def package(artefact, tmp_path_factory):
    return artefact.program.parts[1].program.save(tmp_path_factory.mktemp("packages") / "head.pt2")


def changed(package, path, **described):
    """Writes a package that says something else of itself."""
    with zipfile.ZipFile(package) as read, zipfile.ZipFile(path, "w") as written:
        for name in read.namelist():
            content = read.read(name)
            if name.endswith("wrapper_metadata.json"):
                said = json.loads(content)
                said["quantplug"] = json.dumps({**json.loads(said["quantplug"]), **described})
                content = json.dumps(said).encode()
            written.writestr(name, content)
    return path


def test_a_program_of_several_engines_is_saved_and_loaded_with_its_packages(artefact, tmp_path):
    path = artefact.save(tmp_path / "model.zip")
    with pytest.raises(ArtefactError, match=r"^'[^']*model.zip/part1' holds compiled code.*pass trust=True"):
        JoinedProgram.load(path)
    loaded = JoinedProgram.load(path, trust=True)
    assert [type(part.program) for part in loaded.parts] == [X86Program, X86Package, X86Program]
    assert loaded.ops == artefact.program.ops
    for x, scale in ((X, X[:1, :1]), (-X, 3 * X[:1, :1])):
        for _ in range(2):
            found = loaded(x, scale=scale)
            assert torch.equal(found["classes"], artefact(x, scale)["classes"])
            assert sqnr(found["classes"], artefact.reference(x, scale=scale)["classes"]) > 40
            assert torch.equal(found["features"][0], artefact(x, scale)["features"][0])
    with pytest.raises(LoweringError, match="Input 0 of the program"):
        loaded(X[:1], X[:1, :1])


def test_a_package_is_read_by_who_trusts_it(artefact, package, tmp_path):
    original, loaded = artefact.program.parts[1].program, X86Package.load(package, trust=True)
    assert loaded.ops == original.ops
    given = original._signature.inputs
    integers = [torch.full(each.sizes, 3, dtype=each.dtype) for each in given]
    assert torch.equal(loaded(*integers)[0], original(*integers)[0])
    again = loaded.save(tmp_path / "again.pt2")
    assert again.read_bytes() == package.read_bytes()
    package_of_torch = torch._inductor.aoti_load_package(str(again))
    assert torch.equal(package_of_torch(*integers)[0], original(*integers)[0])
    with pytest.raises(ArtefactError, match=r"holds compiled code, which would run here.*pass trust=True"):
        X86Package.load(package)
    with pytest.raises(ArtefactError, match=r"is a compiled package, which `X86Package.load` reads"):
        X86Program.load(package)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"features": ["avx2", "avx1024"]}, r"for a processor with avx1024, which this one lacks; lower the model"),
        ({"platform": "amiga m68k"}, r"compiled on amiga m68k, and this is \w+ \w+; lower the model on this machine"),
        ({"ops": 3}, r"is no package of the x86 lowering \(.*'ops'.* is '?3"),
        ({"more": 3}, r"is no package of the x86 lowering \(.*'more'"),
    ],
    ids=str,
)
def test_what_a_package_says_of_itself_is_checked_before_it_runs(package, described, said, tmp_path, monkeypatch):
    monkeypatch.setattr(torch._inductor, "aoti_load_package", None)  # whoever calls it has an error of another kind
    with pytest.raises(ArtefactError, match=said):
        X86Package.load(changed(package, tmp_path / "changed.pt2", **described), trust=True)


def test_a_processor_whose_products_saturate_refuses_it(package, monkeypatch):
    monkeypatch.setattr(processor, "kernels_saturate", lambda: True)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", None)
    with pytest.raises(ArtefactError, match=r"cannot run here: this processor has no VNNI.*; lower the model"):
        X86Package.load(package, trust=True)


def test_files_that_are_none_are_one_sentence(tmp_path):
    buffer = io.BytesIO()
    torch.save(torch.ones(3), buffer)
    for name, content in {"text.pt2": b"text", "pickle.pt2": buffer.getvalue()}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArtefactError, match=rf"{name}' is no package of the x86 lowering .*`X86Package.save`"):
            X86Package.load(tmp_path / name, trust=True)
    with pytest.raises(ArtefactError, match="There is no file"):
        X86Package.load(tmp_path / "absent.pt2", trust=True)


def test_loading_needs_no_compiler_and_says_nothing(package, monkeypatch, caplog):
    monkeypatch.setattr("torch._inductor.codecache.get_device_information", _no_compiler)
    with caplog.at_level(logging.WARNING):
        X86Package.load(package, trust=True)
    assert caplog.text == ""


def _no_compiler(device):
    raise RuntimeError("no compiler")


def test_a_state_has_no_place_in_a_package():
    import stateful_models

    (first,) = stateful_models.calls(1)
    converted = reference(stateful_models.Slots().eval(), quantplug.get_quantizer("x86"), first)
    with pytest.raises(LoweringError, match=r"A package keeps no state.*save the program instead \(engine 'onednn'\)"):
        quantplug.get_quantizer("x86").backend.lower(converted, (first,), engine="onednn_package")
