"""Adaptive max-pools, which the runtime has no kernel for: max-pools where their windows are even, else a reason."""

import pytest
import torch
import torch.nn.functional as F
from qdq_graphs import Net, decibels
from torch import nn

import quantplug
from quantplug.core.errors import LoweringError
from quantplug.lowering.xnnpack.rewrites import rewrite_for_xnnpack

EVEN = {
    "all of an image": (lambda x: F.adaptive_max_pool2d(x, 1), (2, 3, 8, 8)),
    "quarters": (lambda x: F.adaptive_max_pool2d(x, 2), (2, 3, 8, 10)),
    "rows as they are": (lambda x: F.adaptive_max_pool2d(x, (None, 2)), (2, 3, 8, 8)),  # type: ignore[arg-type]
    "windows that overlap": (lambda x: F.adaptive_max_pool2d(x, 3), (2, 3, 9, 9)),
    "all of a sequence": (lambda x: F.adaptive_max_pool1d(x, 1), (2, 3, 9)),
    "all of a volume": (lambda x: F.adaptive_max_pool3d(x, 1), (2, 3, 5, 6, 7)),
}


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("name", EVEN)
def test_even_windows_are_max_pools(name, is_strict):
    pool, shape = EVEN[name]
    x, model = torch.randn(shape), Net(lambda _, x: pool(x))
    graph = rewrite_for_xnnpack(torch.export.export(model, (x,), strict=is_strict).module())
    assert not any("adaptive" in str(node.target) for node in graph.graph.nodes)
    fresh = torch.randn(shape)
    torch.testing.assert_close(graph(fresh), model(fresh), rtol=0, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_open", [False, True], ids=["fixed", "any batch"])
@pytest.mark.parametrize("dims", [1, 2])
def test_pools_behind_convolutions_run_on_integers(dims, is_open):
    layer, pool = (nn.Conv1d, nn.AdaptiveMaxPool1d) if dims == 1 else (nn.Conv2d, nn.AdaptiveMaxPool2d)
    model = nn.Sequential(layer(3, 8, 3), pool(2), nn.Flatten(), nn.Linear(8 * 2**dims, 4)).eval()
    batches = [torch.randn(2, 3, *[8] * dims) for _ in range(3)]
    shapes = ({0: torch.export.Dim("batch", max=20)},) if is_open else None
    artefact = quantplug.quantize(model, (batches[0],), "xnnpack", batches, dynamic_shapes=shapes, progress=False)
    assert {op.placement for op in artefact.program.ops} == {"int8"} or is_open
    for x in (*batches, *([torch.randn(17, 3, *[8] * dims)] if is_open else [])):
        assert decibels(artefact(x), artefact.reference(x)) >= 40


@pytest.mark.parametrize("options", [{"output_size": 4}, {"output_size": 1, "return_indices": True}])
def test_uneven_windows_and_positions_are_refused_with_a_reason(options):
    x = torch.randn(1, 3, 8, 8)
    model = Net(lambda net, x: F.adaptive_max_pool2d(net.layer(x), **options), layer=nn.Conv2d(3, 4, 3)).eval()
    with pytest.raises(LoweringError, match=r"'adaptive_max_pool2d' .* has no kernel .* divides the input's"):
        quantplug.quantize(model, (x,), "xnnpack", [x], progress=False)
