"""Inspections: figures against sums by hand, the artefact's values, times, files, and wrong input."""

import json
import math
from html.parser import HTMLParser

import pytest
import torch
import torch.nn.functional as F
from models import MobileNet, exported, observed, settled
from planted_faults import PLANTS, clean, net, planted
from torch import nn

import quantplug
from quantplug.core.errors import ArtefactError, CalibrationError, ConfigError, ModelError
from quantplug.core.graph.working_copy import working_copy
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.x86 import lower as lower_to_x86


def by_hooks(model, x, paths):
    """Returns what modules of a float model yield."""
    found = {}
    hooks = [
        model.get_submodule(path).register_forward_hook(lambda m, i, o, path=path: found.update({path: o}))
        for path in paths
    ]
    with torch.no_grad():
        found[""] = model(x)
    for hook in hooks:
        hook.remove()
    return found


def qdq_values(converted, x, names):
    """Returns what the dequantize nodes behind named nodes yield, by torch's own interpreter."""
    run = torch.fx.Interpreter(converted, garbage_collect_values=False)
    with torch.no_grad():
        run.run(x)
    nodes = {node.name: node for node in converted.graph.nodes}

    def behind(node):
        while "dequantize" not in str(node.target):
            node = next(user for user in node.users if user.op == "call_function")
        return run.env[node]

    return {name: behind(nodes[name]) for name in names}


def test_accumulated_and_own_noise_are_those_of_sums_by_hand():
    model, x = net("mlp")
    _, converted = clean("mlp", "x86")
    found = quantplug.inspect(model, converted, [x])
    wanted, rounded = by_hooks(model, x, ["1", "3"]), qdq_values(converted, x, ["input_1", "relu", "relu_1"])
    assert found.layer("linear").decibels() == pytest.approx(sqnr(rounded["relu"], wanted["1"]))
    assert found.layer("linear_1").decibels() == pytest.approx(sqnr(rounded["relu_1"], wanted["3"]))
    # By itself: the float input rounded to its format, the dequantized weight, the rounding behind it.
    nodes = {node.name: node for node in converted.graph.nodes}
    linear = nodes["linear_1"]
    run = torch.fx.Interpreter(converted, garbage_collect_values=False)
    run.run(x)
    q_in, q_out = linear.args[0].args, next(iter(nodes["relu_1"].users)).args

    def rounding(value, args):
        ops = torch.ops.quantized_decomposed
        return ops.dequantize_per_tensor(ops.quantize_per_tensor(value, *args[1:]), *args[1:])

    y = F.relu(F.linear(rounding(wanted["1"], q_in), run.env[linear.args[1]], run.env[linear.args[2]]))
    assert found.layer("linear_1").decibels(own=True) == pytest.approx(sqnr(rounding(y, q_out), wanted["3"]), abs=1e-4)
    assert found.decibels() == pytest.approx(sqnr(converted(x), wanted[""]))


def test_clipped_shares_and_ranges_are_those_of_the_values():
    floats, converted, x = planted(PLANTS["range of a linear layer cut to a quarter"], "x86")
    layer = quantplug.inspect(floats, converted, [x]).layer("linear_1")
    values = by_hooks(net("mlp")[0], x, ["3"])["3"]
    (found,) = layer.ranges
    assert (found.smallest, found.largest) == pytest.approx((0, float(values.max())))
    step = found.highest / 255
    assert found.saturated == pytest.approx(float((values > found.highest + step / 2).double().mean()))
    assert sum(found.histogram) == values.numel()
    assert layer.saturated > 0.05


def test_dead_channels_and_the_worst_one_are_told():
    floats, converted, x = planted(PLANTS["dead channel"], "xnnpack")
    layer = quantplug.inspect(floats, converted, [x]).layer("conv2d_2")
    assert layer.dead == (3,)
    assert layer.worst_channel == 3
    assert layer.worst_decibels < 10
    assert layer.weight == "int8 per channel"


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["mlp", "residual"])
def test_x86_values_inside_of_the_artefact_beside_emulation_and_graph(family):
    model, x = net(family)
    _, converted = clean(family, "x86")
    found = quantplug.inspect(model, converted, [x], backend="x86")
    program = lower_to_x86(converted, (x,))
    with torch.no_grad():
        assert found.decibels("program") == pytest.approx(sqnr(program(x), model(x)), abs=1e-6)
    assert any("bit for bit" in note for note in found.notes)
    computing = [layer for layer in found.layers if layer.operator != "input"]
    for layer in computing:
        for figures in (layer.own, layer.accumulated):
            assert figures.keys() == {"reference", "emulation", "program"}
            assert figures["program"] == pytest.approx(figures["reference"], rel=0.1)
        assert layer.placement == "int8"
        assert layer.time.low <= layer.time.middle <= layer.time.high
    assert any("onednn.q" in layer.kernel for layer in computing)
    assert found.time.middle > 0
    assert len(found.slowest()) == 3


@pytest.mark.slow
def test_a_layer_with_most_of_the_work_takes_the_most_time():
    model = nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.Linear(1024, 4)
    )
    x = torch.randn(64, 16)
    artefact = quantplug.quantize(model.eval(), (x,), "x86", [x], progress=False)
    found = quantplug.inspect(model, artefact, [x])
    assert found.slowest()[0].module_path == "4"


@pytest.mark.slow
def test_xnnpack_values_inside_of_the_artefact_and_times_of_layers_alone():
    model = nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 8)).eval()
    x = torch.randn(64, 16)
    artefact = quantplug.quantize(model, (x,), "xnnpack", [x], progress=False)
    found = quantplug.inspect(model, artefact, [x], times=True)
    assert found.slowest()[0].module_path == "2"
    for layer in found.layers[1:]:
        assert layer.time.low <= layer.time.middle <= layer.time.high
        assert layer.accumulated["program"] == pytest.approx(layer.accumulated["emulation"], rel=1e-3)
    assert any("bit for bit" in note for note in found.notes)
    assert found.decibels("program") == pytest.approx(sqnr(artefact(x), model(x)), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dead channel", "bias twice as large"])
def test_faults_are_named_on_xnnpack_with_the_artefact_beside_them(name):
    floats, converted, x = planted(PLANTS[name], "xnnpack")
    found = quantplug.inspect(floats, converted, [x], backend="xnnpack")
    assert found.costliest()[0].node == PLANTS[name].layer
    assert found.costliest()[0].fault == PLANTS[name].kind
    assert "program" in found.output


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_faults_are_named_on_x86_with_the_artefact_beside_them(name):
    plant = PLANTS[name]
    floats, converted, x = planted(plant, "x86")
    found = quantplug.inspect(floats, converted, [x], backend="x86")
    assert found.costliest()[0].fault == plant.kind
    assert found.costliest()[0].node in (plant.layer, *plant.also)


def test_a_kernel_that_computes_something_else_is_named():
    """The backend's lowering takes tanh for a relu."""

    def wrong(module, example_inputs, **options):
        copied = working_copy(module)
        for node in copied.graph.nodes:
            node.target = torch.ops.aten.tanh.default if node.name == "relu_1" else node.target
        copied.recompile()
        return lower_to_x86(copied, example_inputs, **options)

    class Wrong(quantplug.BackendQuantizer):
        backend = quantplug.derive(quantplug.get_quantizer("x86").backend, "xray_wrong", lowering=wrong)

    model, x = net("mlp")
    _, converted = clean("mlp", "x86")
    assert quantplug.inspect(model, converted, [x], backend="x86").faults == ()
    found = quantplug.inspect(model, converted, [x], backend=Wrong())
    assert [(layer.node, layer.fault) for layer in found.faults] == [("linear_1", "other kernel")]


def test_the_model_and_the_graph_stay_as_they_are_and_a_second_call_says_the_same():
    floats, converted = clean("depthwise", "x86")
    x = net("depthwise")[1]
    before = [str(floats.graph), str(converted.graph), {k: v.clone() for k, v in converted.state_dict().items()}]
    one, two = (quantplug.inspect(floats, converted, [x]) for _ in range(2))
    assert one == two
    assert [str(floats.graph), str(converted.graph)] == before[:2]
    assert all(torch.equal(value, before[2][name]) for name, value in converted.state_dict().items())


class Counter(nn.Module):
    """Has a state, and writes through a view."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        y = self.first(x).clone()
        y[:, 0] = 0
        return self.second(y.relu_()) * self.calls


def test_state_and_writes_through_views_are_those_of_a_first_call_and_stay_the_models():
    model, x = Counter().eval(), torch.randn(16, 8)
    artefact = quantplug.quantize(model, (x,), "x86", [x], progress=False)
    one, two = (quantplug.inspect(model, artefact, [x, x], times=False) for _ in range(2))
    assert one == two
    assert one.faults == ()
    artefact.program.restart()
    with torch.no_grad():
        assert one.decibels("program") == pytest.approx(sqnr(artefact(x), Counter.forward(model, x)), abs=1e-3)
    assert float(dict(artefact.reference.named_buffers())["calls"]) == 0


def test_a_scale_that_is_not_finite_is_named_and_can_be_written():
    floats, converted = clean("mlp", "x86")
    broken = working_copy(converted)
    quantize = next(n for n in broken.graph.nodes if n.name == "relu_1").users
    for node in [*quantize, *next(iter(quantize)).users]:
        node.update_arg(1, math.inf)
    broken.recompile()
    found = quantplug.inspect(floats, broken, [net("mlp")[1]])
    assert (found.costliest()[0].node, found.costliest()[0].fault) == ("linear_1", "not finite")
    assert quantplug.Inspection.from_json(found.to_json()) == found
    assert "not finite" in found.html()


def test_masks_of_infinity_inside_of_a_model_are_no_noise():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            scores = self.q(x) @ self.k(x).transpose(1, 2)
            hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
            return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ self.v(x)

    model, x = Masked().eval(), torch.randn(4, 6, 16)
    artefact = quantplug.quantize(model, (x,), "x86", [x], progress=False)
    found = quantplug.inspect(model, artefact, [x])
    assert found.faults == ()
    assert found.decibels("program") > 30
    assert quantplug.Inspection.from_json(found.to_json()) == found
    with torch.no_grad(), pytest.raises(CalibrationError, match="output has NaN or infinity"):
        quantplug.inspect(nn.Sequential(model, nn.Threshold(9e9, -math.inf)).eval(), artefact, [x])


def test_float_models_of_every_form_give_the_same():
    model, x = net("mlp")
    floats, converted = clean("mlp", "x86")
    forms = (model, torch.export.export(model, (x,)), floats)
    found = [quantplug.inspect(form, converted, [x]) for form in forms]
    assert found[0] == found[1] == found[2]


def test_batches_are_taken_until_they_hold_the_samples_and_inputs_are_picked():
    model, _ = net("mlp")
    _, converted = clean("mlp", "x86")
    batches = [(torch.randn(32, 16), torch.zeros(32)) for _ in range(5)]
    found = quantplug.inspect(model, converted, batches, inputs=lambda batch: batch[0], samples=70)
    assert found.samples == 96


@pytest.mark.slow
def test_q_dq_graphs_of_other_quantizers_have_layers_too():
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    model, x = net("depthwise")
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(exported(model, x), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    found = quantplug.inspect(model, converted, [x])
    assert found.faults == ()
    assert found.layer("conv2d_2").weight == "int8 per channel"
    nodes = {node.name: node for node in converted.graph.nodes}
    quantize = next(iter(nodes["conv2d_3"].users))
    for node in (quantize, *quantize.users):
        node.update_arg(1, node.args[1] / 4)
    converted.recompile()
    found = quantplug.inspect(model, converted, [x])
    assert (found.costliest()[0].node, found.costliest()[0].fault) == ("conv2d_3", "clipped range")


@pytest.fixture(scope="module")
def pair():
    """Inspections of a model with a fault, and of the sound one."""
    floats, converted, x = planted(PLANTS["range of a linear layer cut to a quarter"], "x86")
    sound = clean("mlp", "x86")
    return quantplug.inspect(floats, converted, [x], backend="x86"), quantplug.inspect(*sound, [x], backend="x86")


def test_json_keeps_all_of_it_and_other_text_is_refused(pair):
    assert quantplug.Inspection.from_json(pair[0].to_json()) == pair[0]
    assert json.loads(pair[0].to_json())["layers"][0]["node"] == "input_1"
    for text in ("", "[]", "{}", '{"backend": 3}', pair[0].to_json().replace('"samples"', '"sample"')):
        with pytest.raises(ArtefactError, match=r"no inspection .*to_json"):
            quantplug.Inspection.from_json(text)


def test_the_table_and_the_summary_name_layer_fault_and_remedy(pair):
    text = str(pair[0])
    assert "linear_1" in text
    assert "clipped range" in text
    assert "quantplug.calibrate(prepared, batches)" in text
    assert "quantizer.set_module_name(" in text
    assert "microseconds" in text


class Page(HTMLParser):
    """What a page holds."""

    def __init__(self, text):
        super().__init__()
        self.sections, self.images, self.links, self.open, self.code = {}, [], [], [], []
        self._place, self._in_pre = "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "div" and given.get("id"):
            self._place = given["id"]
        if tag == "section":
            self.sections.setdefault(self._place, []).append((given["data-layer"], given.get("data-fault", "")))
        self._in_pre = tag == "pre" or (self._in_pre and tag not in ("section",))
        self.images += [given["src"]] if tag == "img" else []
        self.links += [value for name, value in attributes if name in ("href", "src") and value]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"
        self._in_pre = self._in_pre and tag != "pre"

    def handle_data(self, data):
        if self._in_pre:
            self.code.append(data)


def test_the_page_opens_with_the_costliest_and_the_slowest_layers_and_needs_nothing_else(pair):
    text = pair[0].html("A model <with> faults", before=pair[1])
    page = Page(text)
    assert page.open == []
    assert page.sections["costliest"][0] == ("linear_1", "clipped range")
    assert [name for name, _ in page.sections["costliest"]] == [layer.node for layer in pair[0].costliest()]
    assert [name for name, _ in page.sections["slowest"]] == [layer.node for layer in pair[0].slowest()]
    assert len(page.sections["costliest"]) == len(page.sections["slowest"]) == 3
    assert page.code[:3] == [layer.remedy for layer in pair[0].costliest()]
    assert len(page.images) == 1 + len(pair[0].layers)
    assert all(link.startswith(("data:image/png;base64,", "#layer-")) for link in page.links)
    assert "A model &lt;with&gt; faults" in text
    assert "Before and after" in text


def test_a_model_of_several_inputs_some_by_name():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x, *, y):
            return torch.relu(self.a(x) + self.b(y))

    model, batch = Two().eval(), {"x": torch.randn(16, 8), "y": torch.randn(16, 4)}
    artefact = quantplug.quantize(
        model, (batch["x"],), "x86", [batch], example_kwargs={"y": batch["y"]}, progress=False
    )  # fmt: skip
    program = torch.export.export(model, (batch["x"],), {"y": batch["y"]})
    found = quantplug.inspect(program, artefact, [batch])
    assert found.decibels("program") > 30
    assert found.faults == ()


def test_integer_inputs_and_outputs_are_given_and_compared_as_floats():
    model, x = net("mlp")
    quantizer = quantplug.get_quantizer("xnnpack").set_global("int8").set_io(input=torch.int8, output=torch.int8)
    converted = quantplug.convert_pt2e(observed(model, quantizer, x))
    found = quantplug.inspect(model, converted, [x])
    assert found.decibels() == pytest.approx(quantplug.inspect(*clean("mlp", "xnnpack"), [x]).decibels(), abs=1e-6)
    assert found.faults == ()


def test_a_float_model_that_the_graph_was_not_made_of_is_refused():
    other = nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 4, 1)).eval()
    with pytest.raises(ModelError, match=r"shapes \[\(32, 4, 4\)\] and the q/dq graph \[\(32, 10\)\]"):
        quantplug.inspect(other, clean("mlp", "x86")[1], [torch.randn(32, 16)])
    other = nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 10, 16), nn.Flatten()).eval()
    with pytest.raises(ModelError, match="namesake in the float model"):
        quantplug.inspect(other, clean("mlp", "x86")[1], [torch.randn(32, 16)])


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"data": []}, CalibrationError, "1 or more batches"),
        ({"data": [torch.randn(32, 5)]}, CalibrationError, "shape"),
        ({"data": [torch.full((32, 16), math.nan)]}, CalibrationError, "NaN or infinity"),
        ({"samples": 0}, ConfigError, "samples takes a number from 1 on, found 0"),
        ({"backend": "x68"}, ConfigError, "x68"),
        ({"quantized": "floats"}, ModelError, "quantizes nothing"),
        ({"quantized": 3}, ModelError, "exported graph module, found int"),
    ],
)
def test_what_is_wrong_with_what_is_given_is_one_sentence(change, error, says):
    floats, converted = clean("mlp", "x86")
    given = {"data": [net("mlp")[1]], "quantized": converted, **change}
    if given["quantized"] == "floats":
        given["quantized"] = floats
    quantized, data = given.pop("quantized"), given.pop("data")
    with pytest.raises(error, match=says) as raised:
        quantplug.inspect(floats, quantized, data, **given)
    assert str(raised.value).count(". ") == 0


def test_an_artefact_is_of_one_backend():
    model, x = net("mlp")
    artefact = quantplug.quantize(model, (x,), "x86", [x], progress=False)
    with pytest.raises(ConfigError, match="of backend 'x86' and backend 'xnnpack' was given"):
        quantplug.inspect(model, artefact, [x], backend="xnnpack")


@pytest.mark.slow
def test_layers_with_a_batch_norm_that_was_folded_are_held_against_the_norm():
    x = torch.randn(8, 3, 32, 32)
    model = settled(MobileNet(), x)
    converted = quantplug.convert_pt2e(observed(model, quantplug.get_quantizer("x86"), x))
    found = quantplug.inspect(model, converted, [x])
    wanted = by_hooks(model, x, ["blocks.1.conv.7"])["blocks.1.conv.7"]
    values = qdq_values(converted, x, ["conv2d_6"])["conv2d_6"]
    assert found.layer("conv2d_6").decibels() == pytest.approx(sqnr(values, wanted), abs=0.01)
