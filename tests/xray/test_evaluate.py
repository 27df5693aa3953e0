"""Evaluations: metrics and intervals against known ones, forms against hits counted by hand, and wrong input."""

import math

import pytest
import torch
from models import observed
from planted_faults import clean, net
from torch import nn

import quantplug
from quantplug.core.errors import ArtefactError, CalibrationError, ConfigError
from quantplug.metrics import metric_of


def pairs(labels=None, sizes=(32, 32, 20)):
    """Batches of the perceptron with labels: those of the float model, of which some are wrong."""
    model, _ = net("mlp")
    found = []
    for size in sizes:
        x = torch.randn(size, 16)
        with torch.no_grad():
            told = model(x).argmax(1)
        told[::10] = (told[::10] + 1) % 10
        found.append((x, told if labels is None else labels(x)))
    return found


def test_all_forms_are_scored_on_the_same_samples_a_smaller_last_batch_included():
    model, x = net("mlp")
    artefact = quantplug.quantize(model, (x,), "x86", [x], progress=False)
    data = pairs()
    found = quantplug.evaluate(model, artefact, data)
    assert found.samples == 84
    assert [score.form for score in found.scores] == ["float", "reference", "program"]
    with torch.no_grad():
        hits = torch.cat([model(inputs).argmax(1) == labels for inputs, labels in data]).double()
        filled = [torch.cat((inputs, inputs[-1:].expand(32 - len(inputs), 16))) for inputs, _ in data]
        run = [
            artefact(whole)[: len(labels)].argmax(1) == labels for whole, (_, labels) in zip(filled, data, strict=True)
        ]
    assert found.score("float").value == pytest.approx(float(hits.mean()))
    assert found.score("program").value == pytest.approx(float(torch.cat(run).double().mean()))
    score = found.score("program")
    assert score.difference == pytest.approx(score.value - found.score("float").value)
    assert score.difference_low <= score.difference <= score.difference_high


def test_wilsons_interval_is_that_of_the_tables():
    """Of 84 hits in 100 samples: 0.7558 to 0.8990 (Wilson, without correction for continuity)."""
    model, _ = net("mlp")
    _, converted = clean("mlp", "x86")
    hits = torch.arange(96) < 84

    def metric(outputs, labels):
        return hits.double()

    data = pairs(sizes=(32, 32, 32))
    score = quantplug.evaluate(model, converted, data, metric).score("float")
    share, count, z = 84 / 96, 96, 1.959964
    middle, half = share + z * z / 2 / count, z * math.sqrt(share * (1 - share) / count + z * z / 4 / count**2)
    assert (score.low, score.high) == pytest.approx(
        ((middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count))
    )
    assert (score.low, score.high) == pytest.approx((0.7943, 0.9269), abs=2e-4)


def test_the_bootstrap_of_a_mean_agrees_with_the_normal_distribution():
    model, _ = net("mlp")
    _, converted = clean("mlp", "x86")

    def confidence(outputs, labels):
        return outputs.softmax(1).max(1).values

    data = pairs(sizes=(32,) * 8)
    found = quantplug.evaluate(model, converted, data, confidence)
    with torch.no_grad():
        each = torch.cat([confidence(model(x), None) for x, _ in data]).double()
    half = 1.96 * float(each.std()) / math.sqrt(len(each))
    score = found.score("float")
    assert score.value == pytest.approx(float(each.mean()))
    assert score.high - score.low == pytest.approx(2 * half, rel=0.12)
    assert "bootstrap" in found.interval
    # Of pairs the difference is known far better than each of the two.
    graph = found.score("reference")
    assert graph.difference_high - graph.difference_low < (graph.high - graph.low) / 5


def test_a_metric_of_all_samples_together_has_an_interval_too():
    model, _ = net("mlp")
    _, converted = clean("mlp", "x86")

    def correlation(outputs, labels):
        return float(torch.corrcoef(torch.stack((outputs[:, 0], labels)))[0, 1])

    data = pairs(labels=lambda x: net("mlp")[0](x).detach()[:, 0] + 0.05 * torch.randn(len(x)))
    found = quantplug.evaluate(model, converted, data, correlation)
    for score in found.scores:
        assert score.low < score.value < score.high <= 1
    assert found.metric == "correlation"


def test_a_broken_model_is_seen_to_be_worse_beyond_chance():
    model, x = net("mlp")
    quantizer = quantplug.get_quantizer("x86").set_global("int8")
    converted = quantplug.convert_pt2e(observed(model, quantizer, x))
    quantize = next(node for node in converted.graph.nodes if "quantize_per_tensor" in str(node.target))
    for node in (quantize, *quantize.users):
        node.update_arg(1, node.args[1] * 30)
    converted.recompile()
    found = quantplug.evaluate(model, converted, pairs(sizes=(32,) * 4)).score("reference")
    assert found.difference_high < 0


def test_batches_of_other_forms_are_picked_apart():
    model, _ = net("mlp")
    _, converted = clean("mlp", "x86")
    plain = quantplug.evaluate(model, converted, pairs())
    torch.manual_seed(0)
    data = [{"image": x, "label": y} for x, y in pairs()]
    picked = quantplug.evaluate(model, converted, data, inputs=lambda b: b["image"], labels=lambda b: b["label"])
    assert picked.samples == plain.samples


def test_json_keeps_all_of_it():
    found = quantplug.evaluate(net("mlp")[0], clean("mlp", "x86")[1], pairs())
    assert quantplug.Evaluation.from_json(found.to_json()) == found
    assert "Wilson" in str(found)
    with pytest.raises(ArtefactError, match="no evaluation"):
        quantplug.Evaluation.from_json('{"metric": 3}')


def _batch(**change):
    return [{"x": torch.randn(32, 16), "y": torch.zeros(32, dtype=torch.int64), **change}]


@pytest.mark.parametrize(
    ("data", "metric", "error", "says"),
    [
        ([], "top1", CalibrationError, "1 or more batches"),
        (_batch(), "top2", ConfigError, r"no metric 'top2' \(did you mean 'top[15]'\?\)"),
        (_batch(y=torch.zeros(31, dtype=torch.int64)), "top1", CalibrationError, "32 samples and 31 labels"),
        (_batch(x=torch.zeros(0, 16), y=torch.zeros(0)), "top1", CalibrationError, "0 samples and 0 labels"),
        (_batch(x=torch.full((32, 16), math.nan)), "top1", CalibrationError, "NaN or infinity"),
        (_batch(y=torch.full((32,), math.nan)), "top1", CalibrationError, "'labels' of batch 0 has NaN"),
        (_batch(y=torch.zeros(32)), "top1", ConfigError, "integer labels"),
        (_batch(y=torch.full((32,), 10)), "top1", ConfigError, "Labels go from 10 to 10, and the model has 10 classes"),
        (_batch(), lambda outputs, labels: "good", ConfigError, "returned 'good' for 32 samples"),
        (_batch(), lambda outputs, labels: outputs[:3, 0], ConfigError, r"\(3,\)"),
        (_batch(), lambda outputs, labels: math.nan, ConfigError, "one finite number"),
        (_batch(), lambda outputs, labels: outputs.no_such, ConfigError, "fails"),
    ],
)
def test_what_is_wrong_with_what_is_given_is_one_sentence(data, metric, error, says):
    with pytest.raises(error, match=says) as raised:
        quantplug.evaluate(
            net("mlp")[0], clean("mlp", "x86")[1], data, metric, inputs=lambda b: b["x"], labels=lambda b: b["y"]
        )
    assert str(raised.value).count(". ") == 0


def test_pairs_are_asked_for():
    with pytest.raises(CalibrationError, match=r"pairs of inputs and labels; pass inputs= and labels="):
        quantplug.evaluate(net("mlp")[0], clean("mlp", "x86")[1], [torch.randn(32, 16)])


def test_a_file_with_a_metric_runs_where_it_is_trusted(tmp_path):
    path = tmp_path / "my_metric.py"
    path.write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef hits(outputs, labels):\n    return labels == labels\n"
    )
    with pytest.raises(ArtefactError, match="pass --trust"):
        metric_of(f"{path}:hits", trust=False)
    assert not (tmp_path / "ran").exists()
    metric = metric_of(f"{path}:hits", trust=True)
    found = quantplug.evaluate(net("mlp")[0], clean("mlp", "x86")[1], pairs(), metric)
    assert found.metric == "hits"
    assert found.score("float").value == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("none.py:hits", "no file 'none.py'"),
        ("my_metric.py", "names no function"),
        ("my_metric.py:", "names no function"),
        ("top1:hits", "names no function"),
        ("{}:hit", r"no function 'hit' \(did you mean 'hits'\?\)"),
        ("{}:__name__", "no function '__name__'"),
        ("top", "no metric 'top'"),
    ],
)
def test_typos_in_a_metrics_name_are_one_sentence(tmp_path, text, says):
    path = tmp_path / "my_metric.py"
    path.write_text("def hits(outputs, labels):\n    return labels == labels\n")
    with pytest.raises((ConfigError, ArtefactError), match=says):
        metric_of(text.format(path), trust=True)


def test_a_file_that_fails_is_told(tmp_path):
    path = tmp_path / "my_metric.py"
    path.write_text("import no_such_module\n")
    with pytest.raises(ArtefactError, match=r"fails when it is run .*no_such_module"):
        metric_of(f"{path}:hits", trust=True)


@pytest.mark.slow
def test_the_artefact_of_xnnpack_is_scored_too():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)).eval()
    x = torch.randn(32, 16)
    artefact = quantplug.quantize(model, (x,), "xnnpack", [x], progress=False)
    data = [(x, model(x).argmax(1)), (x[:7], model(x[:7]).argmax(1))]
    found = quantplug.evaluate(model, artefact, data)
    assert found.samples == 39
    assert found.score("float").value == 1
    assert found.score("program").value > 0.9
