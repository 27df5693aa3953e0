"""Everybody's quantizers side by side, and one program for several backends."""

from pathlib import Path
from typing import Any

import openvino
import pytest
import torch
from compositions import (
    BACKBONE,
    CORES,
    ENCODER,
    HEAD,
    WORDS,
    Images,
    Tagger,
    X,
    converted,
    executorchs,
    mixed,
    owners,
    torchaos_x86,
)
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from executorch.runtime import Runtime
from models import needs_vnni
from openvino.frontend.pytorch.torchdynamo.compile import openvino_compile
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torchao.quantization.pt2e.quantizer import embedding_quantizer as torchao_embedding

import quantplug
from quantplug import ComposableQuantizer, EmbeddingQuantizer, explain, get_quantizer
from quantplug.core.specs.levels import sqnr


@pytest.mark.slow
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("table", [EmbeddingQuantizer, torchao_embedding.EmbeddingQuantizer])
def test_embedding_dynamic_linears_and_static_linears(core, table):
    model = Tagger().eval()
    quantizer = (
        ComposableQuantizer()
        .add(get_quantizer("x86"), HEAD, precedence=1)
        .add(table(), precedence=2, name="table")
        .add(get_quantizer("xnnpack").set_global("int8_dynamic"), ENCODER, precedence=1)
    )
    reference = converted(model, quantizer, WORDS, core=CORES[core])
    assert owners(reference) == {
        "embedding": "table",
        "linear": "xnnpack",
        "linear_1": "xnnpack",
        "linear_2": "x86",
        "relu_1": "x86",
        "linear_3": "x86",
    }
    report = explain(reference)
    assert "per channel" in report.row("embedding").how
    assert report.row("linear").how.startswith("dynamic int8")
    assert report.row("linear_2").how.startswith("uint8")
    assert sqnr(reference(WORDS), model(WORDS)) > 30
    if core == "ours":
        for backend, portable in (("xnnpack", {"embedding"}), ("x86", set())):
            program = get_quantizer(backend).backend.lower(reference, (WORDS,))
            assert sqnr(program(WORDS), reference(WORDS)) > 40
            assert {op.node for op in program.ops if op.placement == "portable"} == portable


@pytest.mark.few(1)
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("backbone", "head"),
    [(executorchs, torchaos_x86), (torchaos_x86, None)],
)
def test_foreign_quantizers_keep_to_their_regions_beside_ours(core, backbone, head):
    first, second = backbone or (lambda: get_quantizer("x86")), head or (lambda: get_quantizer("xnnpack"))
    quantizer = (
        ComposableQuantizer()
        .add(second(), HEAD, precedence=0, name="second")
        .add(first(), BACKBONE, precedence=0, name="first")
    )
    reference = converted(Images().eval(), quantizer, X, core=CORES[core])
    found = owners(reference)
    assert {found.pop(name) for name in ("conv2d", "relu", "conv2d_1", "max_pool2d")} == {"first"}
    assert {found.pop(name) for name in ("linear", "relu_1", "linear_1")} == {"second"}
    assert found in ({}, {"flatten": "second"})
    assert explain(reference).notes == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "floats"), [("xnnpack", {"linear_1"}), pytest.param("x86", set(), marks=needs_vnni)]
)
def test_what_foreign_quantizers_annotated_side_by_side_runs_on_either_target(backend, floats):
    quantizer = ComposableQuantizer().add(torchaos_x86(), HEAD).add(executorchs(), BACKBONE)
    reference = converted(Images().eval(), quantizer, X)
    program = get_quantizer(backend).backend.lower(reference, (X,))
    assert sqnr(program(X), reference(X)) > 40
    assert {op.node for op in program.ops if op.placement != "int8"} == floats


@pytest.mark.parametrize("core", CORES)
def test_both_cores_give_the_same_numbers(core):
    torch.manual_seed(3)
    model = Images().eval()
    reference = converted(model, mixed(), X, core=CORES[core])
    torch.manual_seed(3)
    again = converted(Images().eval(), mixed(), X)
    assert torch.equal(reference(X), again(X))


def test_training_goes_through_the_same_composition():
    config = quantplug.get_symmetric_quantization_config(True, is_qat=True)
    quantizer = (
        ComposableQuantizer()
        .add(get_quantizer("xnnpack").set_global(config), BACKBONE)
        .add(get_quantizer("xnnpack").set_global(config), HEAD)
    )
    model = torch.export.export(Images(norm=True).train(), (X,)).module()
    prepared = quantplug.prepare_qat_pt2e(model, quantizer)
    prepared(X).square().mean().backward()
    found = owners(quantplug.convert_pt2e(prepared.eval()))
    assert found["conv2d"] == "xnnpack 1"
    assert found["linear"] == "xnnpack 2"


@pytest.mark.slow
def test_a_backbone_on_xnnpack_and_a_head_on_portable_kernels_in_one_program(tmp_path):
    model = Images().eval()
    reference = converted(model, mixed(), X)
    program: Any = get_quantizer("xnnpack").backend.lower(reference, (X,), accepts=lambda node: node in BACKBONE)
    placed = {op.node: op.placement for op in program.ops}
    assert {placed[name] for name in ("conv2d", "relu", "conv2d_1", "max_pool2d")} == {"int8"}
    assert {placed[name] for name in ("flatten", "linear", "relu_1", "linear_1")} == {"portable"}
    assert program.delegates == 1
    assert program.counts.f32 == 0
    buffer = program.save(tmp_path / "mixed.pte").read_bytes()
    loaded = Runtime.get().load_program(buffer)
    assert sqnr(loaded.load_method("forward").execute([X])[0], reference(X)) > 40


class Offered(Partitioner):
    """A partitioner that takes nothing and remembers what it could have taken."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def partition(self, exported_program):
        self.operators = [str(n.target) for n in exported_program.graph.nodes if n.op == "call_function"]
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={})


@pytest.mark.slow
def test_the_head_is_offered_to_other_delegates():
    reference, other = converted(Images().eval(), mixed(), X), Offered()
    get_quantizer("xnnpack").backend.lower(reference, (X,), accepts=lambda node: node in BACKBONE, partitioners=[other])
    assert any("addmm" in name for name in other.operators)
    assert any("call_delegate" in name for name in other.operators)
    assert not any("convolution" in name for name in other.operators)


class OpenvinoBackend(BackendDetails):
    """What ExecuTorch's own class of this name does; its package does not import without NNCF."""

    @classmethod
    def preprocess(cls, program, specs):
        values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
        inputs = [values[name] for name in program.graph_signature.user_inputs]
        compiled = openvino_compile(program.module(), *inputs, options={"device": "CPU"})
        return PreprocessResult(processed_bytes=compiled.export_model().getvalue())


class LinearLayers(OperatorSupportBase):
    def is_node_supported(self, submodules, node):
        return any(name in str(node.target) for name in ("linear", "addmm", "permute_copy", "view_copy", "relu"))


class OpenVINOPartitioner(Partitioner):
    def partition(self, program):
        delegate = DelegationSpec("OpenvinoBackend", [CompileSpec("device", b"CPU")])
        tags = {}
        for found in CapabilityBasedPartitioner(program.graph_module, LinearLayers()).propose_partitions():
            tags[f"openvino {found.id}"] = delegate
            for node in found.nodes:
                node.meta["delegation_tag"] = f"openvino {found.id}"
        tag_constant_data(program)
        return PartitionResult(tagged_exported_program=program, partition_tags=tags)

    def ops_to_not_decompose(self, program):
        return [], None


@pytest.mark.slow
def test_a_backbone_on_xnnpack_and_a_head_on_openvino_in_one_program(tmp_path, monkeypatch):
    library = next((Path(openvino.__file__).parent / "libs").glob("libopenvino_c.so*"))
    monkeypatch.setenv("OPENVINO_LIB_PATH", str(library))
    model = Images().eval()
    reference = converted(model, get_quantizer("xnnpack").set_global("int8").set_module_name("head", None), X)
    program: Any = get_quantizer("xnnpack").backend.lower(
        reference, (X,), accepts=lambda node: node in BACKBONE, partitioners=[OpenVINOPartitioner()]
    )
    placed = {op.node: (op.placement, op.how) for op in program.ops}
    assert {placed[name] for name in ("conv2d", "relu", "conv2d_1", "max_pool2d")} == {("int8", "")}
    head = ("flatten", "linear", "relu_1", "linear_1")
    assert {placed[name] for name in head} == {("delegate", "OpenvinoBackend runs it")}
    assert {op.reason for op in program.ops if op.node in ("linear", "linear_1")} == {
        "set to float by module name 'head'"
    }
    assert (program.counts.delegates, program.counts.f32, program.counts.portable) == (1, 0, 0)
    buffer = program.save(tmp_path / "mixed.pte").read_bytes()
    assert [buffer.count(name) for name in (b"XnnpackBackend", b"OpenvinoBackend")] == [1, 1]
    loaded = Runtime.get().load_program(buffer)
    assert sqnr(loaded.load_method("forward").execute([X])[0], reference(X)) > 40


@needs_vnni
def test_a_program_for_x86_runs_what_both_annotated():
    reference = converted(Images().eval(), mixed(), X)
    program = get_quantizer("x86").backend.lower(reference, (X,))
    assert {op.placement for op in program.ops} == {"int8"}
    assert sqnr(program(X), reference(X)) > 40
