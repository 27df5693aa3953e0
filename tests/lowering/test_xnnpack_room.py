"""Delegates with which XNNPACK's optimizer reads freed memory or frees it twice."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from qdq_graphs import FULL, A, B, Net, Q, decibels, fake
from torch import nn

import quantplug
from quantplug.lowering.xnnpack import XNNPACKProgram, lower
from quantplug.lowering.xnnpack.serializer.graph import capacity, make_room


@pytest.mark.parametrize(("calls", "expected"), [(1, 64), (64, 64), (65, 128), (257, 512), (513, 1024), (1025, 1536)])
def test_the_array_of_calls_grows_as_xnnpack_grows_it(calls, expected):
    assert capacity(calls) == expected


@pytest.mark.parametrize("calls", [3, 60, 61, 64, 65, 128, 1022, 1024, 1536])
def test_a_full_array_of_calls_gets_another_call_that_nothing_reads(calls):
    held = SimpleNamespace(dims=[2, 3], id_out=0, external_id=0, flags=1)
    value, call = SimpleNamespace(xvalue_union=held), SimpleNamespace(debug_handle=7)
    graph = SimpleNamespace(xnodes=[call] * calls, xvalues=[value], input_ids=[0])
    make_room(graph)
    assert capacity(len(graph.xnodes)) - len(graph.xnodes) >= 4
    assert len(graph.xnodes) - calls <= 4
    assert all(node.xnode_union.input_id == 0 for node in graph.xnodes[calls:])
    assert (held.dims, held.flags) == ([2, 3], 1)


@pytest.mark.slow
def test_a_delegate_of_64_calls_loads_and_runs():
    def forward(net, x):
        x = net.layer(x)
        for _ in range(19):
            x = torch.neg(torch.abs(net.layer(x)))
        return torch.neg(torch.abs(x)).reshape(4, 8) + 1

    x = torch.randn(2, 16)
    artefact = quantplug.quantize(Net(forward, layer=nn.Linear(16, 16)).eval(), (x,), "xnnpack", [x], progress=False)
    assert isinstance(artefact.program, XNNPACKProgram)
    counts = artefact.program.counts
    assert counts.int8 + counts.f32 + counts.converts + counts.moves == 64
    assert decibels(artefact(x), artefact.reference(x)) >= 40


RELEASE = """
import sys
import torch
from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer
program = open(sys.argv[1], "rb").read()
for _ in range(5):
    module = _load_for_executorch_from_buffer(program)
    module.forward([torch.randn(2, 16)])
    del module
"""


def released(program, tmp_path):
    """Loads, runs and releases a program five times in a process of its own, whose heap glibc checks."""
    path = tmp_path / "model.pte"
    program.save(path)
    subprocess.run([sys.executable, "-c", RELEASE, str(path)], check=True)


@pytest.mark.slow
def test_many_elementwise_operators_in_a_row_keep_their_tables(tmp_path):
    """XNNPACK freed the tables of such a row twice."""

    def forward(net, x):
        x = net.layer(x)
        for _ in range(15):
            x = torch.neg(torch.abs(x))
        return x + 1

    model, x = Net(forward, layer=nn.Linear(16, 16)).eval(), torch.randn(2, 16)
    exported = torch.export.export(model, (x,), dynamic_shapes=(({0: torch.export.Dim("batch", max=64)},),)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack"))
    quantplug.calibrate(prepared, [x])
    reference = quantplug.convert_pt2e(prepared)
    program = lower(reference, (x,))
    assert (program.counts.portable, program.counts.delegates) == (0, 1)
    released(program, tmp_path)
    for batch in (1, 2, 5, 64):
        fresh = torch.randn(batch, 16)
        assert decibels(program(fresh), reference(fresh)) >= 40


def test_a_table_added_to_the_first_input_of_a_delegate_is_kept(tmp_path):
    """XNNPACK mistakes that sum for a further call of the row, whose table it frees."""

    def forward(net, first, second):
        first = Q.dequantize_per_tensor(first, *A, *FULL)
        row = fake(torch.neg(fake(torch.abs(fake(second, A)), B)), A)
        return fake(first + row, B), fake(torch.neg(first), A)

    inputs = torch.randint(-128, 127, (2, 16), dtype=torch.int8), torch.randn(2, 16)
    reference = torch.export.export(Net(forward).eval(), inputs).module()
    program = lower(reference, inputs)
    assert (program.counts.int8, program.counts.portable, program.counts.delegates) == (4, 0, 1)
    assert min(map(decibels, program(*inputs), reference(*inputs))) >= 40
