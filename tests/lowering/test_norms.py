"""Normalizations inside of XNNPACK's delegates: files of them against torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import quantplug
from quantplug.core.graph.facts import operator_name
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.rewrites.norms import norms_are_rows, reductions_are_rows


class Applied(nn.Module):
    """A function over parts."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def stirred(part):
    """Gives a norm scales and offsets that are not those of a fresh one."""
    torch.manual_seed(1)
    for parameter in part.parameters():
        parameter.data = torch.randn_like(parameter) + 0.5
    return part


def net(norm, width=32):
    """Layers around a norm, integers on both sides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), norm, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)).eval()


def images(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()


ROWS, PIXELS = (2, 5, 32), (2, 3, 10, 10)
NETS = {
    "layer norm": (lambda: net(stirred(nn.LayerNorm(32))), ROWS),
    "layer norm without scales": (lambda: net(nn.LayerNorm(32, elementwise_affine=False)), ROWS),
    "layer norm without offsets": (lambda: net(stirred(nn.LayerNorm(32, bias=False))), ROWS),
    "layer norm of two dimensions": (lambda: net(stirred(nn.LayerNorm((5, 32)))), ROWS),
    "layer norm of matrices": (lambda: net(stirred(nn.LayerNorm(32))), (4, 32)),
    "RMS norm": (lambda: net(stirred(nn.RMSNorm(32, eps=1e-5))), ROWS),
    "RMS norm without an epsilon": (lambda: net(stirred(nn.RMSNorm(32))), ROWS),
    "RMS norm by hand": (
        lambda: net(Applied(lambda s, x: s.w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), w=_scales())),
        ROWS,
    ),
    "RMS norm by a quotient": (
        lambda: net(
            Applied(lambda s, x: x * (1 / torch.sqrt((x * x).mean(2, keepdim=True) + 1e-6)) * s.w, w=_scales())
        ),
        ROWS,
    ),
    "RMS norm by the length": (
        lambda: net(Applied(lambda s, x: s.w * x / (x.norm(dim=-1, keepdim=True) * 32**-0.5 + 1e-6), w=_scales())),
        ROWS,
    ),
    "unit vectors": (lambda: net(Applied(lambda s, x: F.normalize(x, dim=-1))), ROWS),
    "sums of magnitudes": (lambda: net(Applied(lambda s, x: x / (x.norm(p=1, dim=-1, keepdim=True) + 1))), ROWS),
    "length of a matrix": (lambda: net(Applied(lambda s, x: x / torch.linalg.norm(x, dim=(1, 2), keepdim=True))), ROWS),
    "layer norm by the variance": (
        lambda: net(
            Applied(lambda s, x: (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt())
        ),
        ROWS,
    ),
    "layer norm by the deviation": (
        lambda: net(Applied(lambda s, x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3))),
        ROWS,
    ),
    "layer norm by both at once": (
        lambda: net(Applied(lambda s, x: _standardized(torch.var_mean(x, -1, keepdim=True), x))),
        ROWS,
    ),
    "batch norm of tokens": (
        lambda: net(Applied(lambda s, x: s.norm(x.transpose(1, 2)).transpose(1, 2), norm=_run(nn.BatchNorm1d(32)))),
        ROWS,
    ),
    "mean of tokens": (lambda: net(Applied(lambda s, x: x.mean(1))), ROWS),
    "mean and deviation of tokens": (lambda: net(Applied(lambda s, x: x.mean(1) + x.std(1))), ROWS),
    "tokens with weights": (
        lambda: net(Applied(lambda s, x: (x * x.mean(-1, keepdim=True).softmax(1)).sum(1))),
        ROWS,
    ),
    "mean of rows": (lambda: net(Applied(lambda s, x: x - x.mean(-1, keepdim=True))), ROWS),
    "mean without the dimension": (lambda: net(Applied(lambda s, x: x + x.mean(-1).unsqueeze(-1))), ROWS),
    "mean of two dimensions": (lambda: net(Applied(lambda s, x: x * x.mean((1, 2), keepdim=True))), ROWS),
    "group norm": (lambda: images(stirred(nn.GroupNorm(4, 8))), PIXELS),
    "group norm without scales": (lambda: images(nn.GroupNorm(2, 8, affine=False)), PIXELS),
    "layer norm of channels": (lambda: images(Applied(_channels_first)), PIXELS),
    "softmax of channels": (lambda: images(Applied(lambda s, x: x.softmax(1))), PIXELS),
    "softmax of columns": (lambda: images(Applied(lambda s, x: x.softmax(2))), PIXELS),
    "softmax of lines": (lambda: images(Applied(lambda s, x: x.softmax(-1))), PIXELS),
    "unit pixels": (lambda: images(Applied(lambda s, x: F.normalize(x, dim=1))), PIXELS),
    "response norm over the image": (
        lambda: images(Applied(lambda s, x: _global_response(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))),
        PIXELS,
    ),
    "instance norm": (lambda: images(stirred(nn.InstanceNorm2d(8, affine=True))), PIXELS),
}


def _scales():
    torch.manual_seed(2)
    return nn.Parameter(torch.rand(32) + 0.5)


def _standardized(spread, x):
    variance, mean = spread
    return (x - mean) / (variance + 1e-5).sqrt()


def _channels_first(_, x):
    """As ConvNeXt's first code writes it."""
    mean = x.mean(1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-6)


def _global_response(x):
    """As ConvNeXt V2 writes it."""
    lengths = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
    return x + x * (lengths / (lengths.mean(-1, keepdim=True) + 1e-6))


def _run(norm):
    """Gives a batch norm numbers as if it had been trained."""
    stirred(norm)
    norm.running_mean, norm.running_var = torch.randn_like(norm.running_mean), torch.rand_like(norm.running_var) + 0.5
    return norm


def exact(model, x):
    """Returns what a model computes in double precision."""
    with torch.no_grad():
        return model.double()(x.double()).float()


def counts(artefact):
    return artefact.program.counts


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NETS)
def test_a_norm_between_layers_is_one_delegate(name):
    make, shape = NETS[name]
    model = make()
    batches = [(torch.randn(shape) * (1 + seed),) for seed in range(4)]
    artefact = quantplug.quantize(model, batches[0], "xnnpack", batches, progress=False)
    assert (counts(artefact).delegates, counts(artefact).portable) == (1, 0)
    for [x] in (batches[1], batches[0], batches[1]):
        assert sqnr(artefact(x), artefact.reference(x)) > 35
        assert sqnr(artefact(x), exact(make(), x)) > 20


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name, (_, shape) in NETS.items() if shape == PIXELS])
def test_a_norm_between_dynamic_convolutions_is_one_delegate(name):
    """ExecuTorch's layout pass turned the delegate's input in place of what stands between: all of it was portable."""
    make, shape = NETS[name]
    model = make()
    batches = [(torch.randn(shape) * (1 + seed),) for seed in range(3)]
    artefact = quantplug.quantize(model, batches[0], "xnnpack", config="int8_dynamic", progress=False)
    assert (counts(artefact).delegates, counts(artefact).portable) == (1, 0)
    for [x] in (batches[1], batches[0], batches[1]):
        assert sqnr(artefact(x), artefact.reference(x)) > 25
        assert sqnr(artefact(x), exact(make(), x)) > 20


OF_ANY_NUMBER = [
    *("layer norm", "RMS norm by hand", "group norm", "layer norm by the deviation", "unit vectors", "mean of tokens"),
    *("layer norm of channels", "response norm over the image", "tokens with weights"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ANY_NUMBER)
def test_any_number_of_rows(name):
    make, shape = NETS[name]
    model = make()
    batches = [(torch.randn(count, *shape[1:]),) for count in (3, 1, 6)]
    shapes = ({0: torch.export.Dim("count", min=1, max=16)},)
    artefact = quantplug.quantize(model, batches[0], "xnnpack", batches, dynamic_shapes=shapes, progress=False)
    assert (counts(artefact).delegates, counts(artefact).portable) == (1, 0)
    for [x] in (*batches, batches[0]):
        assert sqnr(artefact(x), exact(make(), x)) > 20


def file_of(norm, x, **options):
    """Returns a norm in float behind a layer that does nothing but is quantized, so that the flow has work."""
    return quantplug.quantize(Beside(norm), (x,), "xnnpack", config="int8_dynamic", progress=False, **options)


class Beside(nn.Module):
    """A norm of what is given, and a layer of that."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.layer = norm, nn.Linear(256, 8)

    def forward(self, x):
        normed = self.norm(x)
        return normed, self.layer(normed)


NORMS = {
    "largest column": (lambda x: torch.linalg.norm(x, 1, dim=(1, 2)), False),
    "singular value": (lambda x: torch.linalg.norm(x, 2, dim=(1, 2)), False),
    "largest number": (lambda x: torch.linalg.vector_norm(x, torch.inf, dim=-1), False),
    "of Frobenius": (lambda x: torch.linalg.norm(x, dim=(1, 2)), True),
    "of all numbers": (lambda x: torch.norm(x, p=2, dim=(1, 2)), True),
    "of vectors": (lambda x: torch.linalg.vector_norm(x, 2, dim=1), True),
    "variance of one": (lambda x: x[:, :1].var(1), False),
    "variance of populations": (lambda x: torch.var(x, dim=(1, 2), correction=0), True),
}


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("name", NORMS)
def test_what_is_another_norm_is_left(name):
    function, is_written = NORMS[name]
    x = torch.randn(2, 5, 32)
    graph = reductions_are_rows(torch.export.export(Applied(lambda _, x: function(x)), (x,)).module())
    names = {operator_name(node) for node in graph.graph.nodes}
    assert ("aten::linear" in names) == is_written
    assert torch.allclose(graph(x), function(x), rtol=1e-5, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("offset", [0.0, 100.0, -3000.0])
def test_rows_far_from_zero_keep_their_differences(make, offset):
    """The mean is off by the roundings of a sum; differences of squares would lose all of it at 3000."""
    torch.manual_seed(0)
    norm = stirred(make(256, eps=1e-5)).eval()
    artefact = file_of(norm, torch.randn(3, 256))
    for seed in range(2):
        x = torch.randn(3, 256, generator=torch.Generator().manual_seed(seed)) + offset
        rounding = 2**-24 * 256**0.5 * abs(offset)
        assert (artefact(x)[0] - exact(norm, x)).abs().max() < 4 * rounding + 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("value", [0.0, 7.0, -1e4])
def test_rows_of_one_number_are_finite(value):
    norm = nn.LayerNorm(256).eval()
    artefact = file_of(norm, torch.randn(2, 256))
    found = artefact(torch.full((2, 256), value))[0]
    # The mean of equal numbers is off by a rounding, which a variance of nothing makes visible.
    assert found.abs().max() <= abs(value) * 2**-22 / 1e-5**0.5


@pytest.mark.slow
def test_what_is_not_accepted_is_left_to_others():
    model = net(nn.LayerNorm(32))
    batches = [(torch.randn(ROWS),) for _ in range(3)]

    def accepts(node):
        return "layer_norm" not in operator_name(node)

    artefact = quantplug.quantize(model, batches[0], "xnnpack", batches, progress=False, accepts=accepts)
    assert counts(artefact).delegates == 2
    assert counts(artefact).portable > 0
    assert sqnr(artefact(*batches[1]), artefact.reference(*batches[1])) > 35


@pytest.mark.slow
def test_half_precision_runs():
    model = net(stirred(nn.LayerNorm(32)))
    x = torch.randn(ROWS)
    with torch.no_grad():
        wanted = model(x)
    artefact = quantplug.quantize(model, (x,), "xnnpack", config="float16", progress=False)
    for _ in range(2):
        assert sqnr(artefact(x), wanted) > 45


@st.composite
def normed(draw):
    """A function of a normalization, and what it is given."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    last = draw(st.integers(1, len(sizes)))
    kept = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    x = torch.randn(*kept, *sizes, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    shape, eps = sizes[len(sizes) - last :], draw(st.sampled_from([1e-12, 1e-5, 0.1]))
    weight = draw(st.sampled_from([None, torch.rand(shape) + 0.5]))
    bias = draw(st.sampled_from([None, torch.randn(shape)]))
    kind = draw(st.sampled_from(["layer", "rms", "mean"]))
    if kind == "layer":
        return Applied(lambda s, x: F.layer_norm(x, shape, weight, bias, eps)), x
    if kind == "rms":
        given_eps = draw(st.sampled_from([eps, None]))
        return Applied(lambda s, x: F.rms_norm(x, shape, weight, given_eps)), x
    axes, keeps = tuple(range(-last, 0)), draw(st.booleans())
    return Applied(lambda s, x: x.mean(axes, keepdim=keeps) * 2), x


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(normed())
def test_rows_compute_what_the_norm_does(drawn):
    model, x = drawn
    graph = norms_are_rows(torch.export.export(model, (x,)).module(), None)
    assert not {operator_name(node) for node in graph.graph.nodes} & {"aten::layer_norm", "aten::rms_norm"}
    # Rows of one number, or of equal ones, have no variance but the roundings of their mean.
    torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=2e-3)
