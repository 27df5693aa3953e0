"""Models that are called by keyword, return dicts and None, and are calibrated with what loaders yield."""

import dataclasses
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.quantizer import ComposableQuantizer as TorchaoComposableQuantizer
from torchao.quantization.pt2e.quantizer import Quantizer

import quantplug
from quantplug.core.specs.levels import sqnr

BACKENDS = ("xnnpack", "x86", "openvino")


class Encoder(nn.Module):
    """Called as Hugging Face's models are: by keyword, in another order than the signature's, with a None."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 16)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, ids, *, mask=None, scale=None, hidden=False):
        states = self.table(ids)
        if scale is not None:
            states = states * scale
        states = torch.relu(self.first(states))
        if mask is not None:
            states = states * mask.unsqueeze(-1)
        return {"last": self.second(states), "pooled": states.mean(1), "attention": None}


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (2, 6), generator=generator)
    mask = (torch.rand(2, 6, generator=generator) > 0.3).float()
    return {"ids": ids, "scale": torch.rand(2, 6, 1, generator=generator) + 0.5, "mask": mask}


def keywords(seed):
    values = batch(seed)
    return {name: values[name] for name in ("scale", "mask")}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["module", "strict", "program"])
def test_a_model_called_by_keyword_runs_as_it_is_called(backend, form):
    model, args = Encoder().eval(), (batch(0)["ids"],)
    given: Any = model
    if form != "module":
        given = torch.export.export(model, args, keywords(0), strict=form == "strict")
    artefact = quantplug.quantize(
        given,
        None if form == "program" else args,
        backend,
        [batch(seed) for seed in range(4)],
        example_kwargs=None if form == "program" else keywords(0),
        progress=False,
    )
    for seed in (7, 8):
        values = batch(seed)
        expected = model(**values)
        found = artefact(**values)
        assert found["attention"] is None
        assert sqnr(found["last"], expected["last"]) > 25
        assert sqnr(found["pooled"], expected["pooled"]) > 25
        mixed = artefact(values["ids"], mask=values["mask"], scale=values["scale"])
        by_position = artefact.program(values["ids"], values["scale"], values["mask"])
        for other in (mixed, by_position):
            for one, two in zip(pytree.tree_leaves(found), pytree.tree_leaves(other), strict=True):
                assert one is two is None or torch.equal(one, two)


def test_all_inputs_can_be_keywords_and_the_batch_open():
    model = Encoder().eval()
    rows = torch.export.Dim("rows", min=1, max=8)
    artefact = quantplug.quantize(
        model,
        backend="x86",
        calibration=[batch(seed) for seed in range(4)],
        example_kwargs=batch(0),
        dynamic_shapes={"ids": {0: rows}, "scale": {0: rows}, "mask": {0: rows}},
        progress=False,
    )
    for count in (1, 5):
        values = {name: torch.cat([v] * 3)[:count] for name, v in batch(3).items()}
        assert sqnr(artefact(**values)["last"], model(**values)["last"]) > 25


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mask": 1, "scale": 2, "idz": 3}, "did you mean 'ids'"),
        ({"ids": 1, "scale": 2}, "'mask' is missing"),
    ],
)
def test_a_wrong_keyword_is_one_sentence(values, said):
    artefact = quantplug.quantize(
        Encoder().eval(), (batch(0)["ids"],), "x86", config="int8_dynamic", example_kwargs=keywords(0)
    )
    with pytest.raises(quantplug.QuantplugError, match=said) as error:
        artefact(**values)
    assert "\n" not in str(error.value)
    with pytest.raises(quantplug.QuantplugError, match="by position and by name"):
        artefact(batch(0)["ids"], **batch(0))


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "openvino"])
def test_a_loaded_program_takes_the_same_keywords(backend, tmp_path):
    artefact = quantplug.quantize(
        Encoder().eval(),
        (batch(0)["ids"],),
        backend,
        [batch(seed) for seed in range(4)],
        example_kwargs=keywords(0),
        progress=False,
    )
    program: Any = type(artefact.program)
    loaded = program.load(artefact.save(tmp_path / "model.pt2"))
    assert torch.equal(loaded(**batch(5))["last"], artefact(**batch(5))["last"])


@dataclasses.dataclass
class Output:
    """An output class of a user's own, as ModelOutput is."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


torch.export.register_dataclass(Output, serialized_type_name="tests.Output")


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))

    def forward(self, image):
        return Output(self.body(image))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_class_comes_back_as_it_is(backend):
    model, x = Classifier().eval(), torch.randn(2, 3, 8, 8)
    artefact = quantplug.quantize(model, (x,), backend, [x], progress=False)
    found = artefact(x)
    assert isinstance(found, Output)
    assert found.loss is None
    assert sqnr(found.logits, model(x).logits) > 25


@pytest.mark.slow
def test_a_loader_of_images_and_labels_works_in_one_call():
    model = Classifier().eval()
    loader = [(torch.randn(2, 3, 8, 8), torch.tensor([0, 1])) for _ in range(3)]
    with pytest.raises(quantplug.QuantplugError, match="inputs="):
        quantplug.quantize(model, (loader[0][0],), "x86", loader, progress=False)
    artefact = quantplug.quantize(
        model, (loader[0][0],), "x86", loader, inputs=lambda pair: pair[0], correct_bias=True, progress=False
    )
    direct = quantplug.quantize(
        model, (loader[0][0],), "x86", [x for x, _ in loader], correct_bias=True, progress=False
    )
    assert torch.equal(artefact(loader[0][0]).logits, direct(loader[0][0]).logits)


class OnlyLinear(Quantizer):
    """A quantizer of a user's own, which knows nothing of ours."""

    def annotate(self, model):
        config = quantplug.get_x86_quantization_config()
        from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

        for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            node.meta["quantization_annotation"] = QuantizationAnnotation(
                input_qspec_map={node.args[0]: config.input_activation, node.args[1]: config.weight}, _annotated=True
            )
        return model

    def validate(self, model):
        pass


def foreign_quantizers():
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as inductor

    theirs = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    x86 = inductor.X86InductorQuantizer().set_global(inductor.get_default_x86_inductor_quantization_config())
    region = quantplug.Region(module="body.3")
    ours = quantplug.ComposableQuantizer().add(quantplug.get_quantizer("xnnpack"), region)
    return OrderedDict(
        executorch=("xnnpack", theirs, {"conv2d", "linear"}),
        torchao=("x86", x86, {"conv2d", "linear"}),
        torchao_composition=("xnnpack", TorchaoComposableQuantizer([theirs]), {"conv2d", "linear"}),
        composition=("xnnpack", ours, {"linear"}),
        own=("x86", OnlyLinear(), {"linear"}),
        torchao_on_openvino=("openvino", x86, {"conv2d"}),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(foreign_quantizers()))
def test_quantize_takes_any_quantizer_and_the_backend_lowers(name):
    backend, quantizer, expected = foreign_quantizers()[name]
    # A strict export: torchao's quantizer finds nothing in others.
    model, x = Classifier().eval(), torch.randn(2, 3, 8, 8)
    program = torch.export.export(model, (x,), strict=True)
    artefact = quantplug.quantize(program, (x,), backend, [x, x * 0.5], quantizer=quantizer, progress=False)
    integer = {op.target.split(".")[1] for op in artefact.program.ops if op.placement == "int8"}
    assert expected <= integer
    assert ("conv2d" in integer) == ("conv2d" in expected)
    assert artefact.backend == backend
    assert sqnr(artefact(x).logits, model(x).logits) > 25


@pytest.mark.slow
def test_a_quantizer_of_one_backend_that_another_lowers_is_told():
    """Given as `quantizer=` alone, one of x86 was lowered to XNNPACK in silence."""
    x, quantizer = torch.randn(2, 3, 8, 8), quantplug.get_quantizer("x86").set_global("int8_weight_only")
    with pytest.warns(UserWarning, match="is for backend 'x86' and the program is made for 'xnnpack'; pass backend="):
        quantplug.quantize(Classifier().eval(), (x,), quantizer=quantizer, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        artefact = quantplug.quantize(Classifier().eval(), (x,), "x86", quantizer=quantizer, progress=False)
    assert artefact.backend == "x86"


def test_a_foreign_static_quantizer_without_data_is_told_so():
    with pytest.raises(quantplug.QuantplugError, match="calibration=loader"):
        quantplug.quantize(Classifier().eval(), (torch.randn(2, 3, 8, 8),), "x86", quantizer=OnlyLinear())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quantizer": "x86"}, "takes an instance of torchao's Quantizer, found str"),
        ({"quantizer": OnlyLinear}, "found OnlyLinear"),
        ({"quantizer": OnlyLinear(), "config": "int8"}, "set_global"),
        ({"backend": OnlyLinear()}, "quantizer="),
        ({"example_kwargs": [1]}, "example_kwargs takes a dict"),
        ({"example_inputs": None}, "no example inputs"),
        ({"example_inputs": {"image": 1}}, "example_kwargs"),
    ],
)
def test_wrong_arguments_are_one_sentence(given, said):
    arguments = {"example_inputs": (torch.randn(2, 3, 8, 8),), "backend": "x86"} | given
    with pytest.raises(quantplug.QuantplugError, match=said) as error:
        quantplug.quantize(Classifier().eval(), **arguments)
    assert "\n" not in str(error.value)


class Several(nn.Module):
    """Takes any number of tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *xs):
        return self.linear(xs[0]) + xs[1]


OPEN = {0: torch.export.Dim("batch", min=1, max=16)}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            (OPEN, OPEN),
            r"not nested as the inputs of Several are; pass {'xs': \(..., ...\)} with None or the sizes of a tensor",
        ),
        ([OPEN, OPEN], "not nested as the inputs"),
        ((OPEN,), "not nested as the inputs"),
        ({"xs": [OPEN, OPEN]}, "not nested as the inputs"),
        ({"x": (OPEN, OPEN)}, "not nested as the inputs"),
        (OPEN[0], "takes a dict by the names of inputs or a tuple, found Dim"),
        (((OPEN, {2: OPEN[0]}),), r"opens dimension 2 of an input of shape \(4, 8\); its dimensions are 0 to 1"),
    ],
)
def test_open_sizes_that_do_not_fit_the_inputs_are_one_sentence(sizes, said):
    inputs = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.raises(quantplug.ConfigError, match=f"^dynamic_shapes .*{said}") as error:
        quantplug.quantize(Several().eval(), inputs, calibration=[inputs], dynamic_shapes=sizes)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [*BACKENDS, "native"])
@pytest.mark.parametrize("sizes", [((OPEN, OPEN),), {"xs": (OPEN, OPEN)}])
def test_a_model_of_any_number_of_inputs_keeps_its_open_sizes(backend, sizes):
    inputs = torch.randn(4, 8), torch.randn(4, 8)
    artefact = quantplug.quantize(Several().eval(), inputs, backend, [inputs], dynamic_shapes=sizes, progress=False)
    for rows in (4, 7):
        x = torch.randn(rows, 8), torch.randn(rows, 8)
        assert sqnr(artefact.reference(*x), artefact(*x)) > 40
