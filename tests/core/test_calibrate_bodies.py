"""Calibration reaches the bodies of control flow: their observers are listed, undone, and taken up again."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.calibration.calibrate import calibrate
from quantplug.core.calibration.observer_places import observer_places
from quantplug.core.errors import CalibrationError
from quantplug.core.observers import NonFiniteError


class Branches(nn.Module):
    """A layer, then one of two more, by the sign of what the layer gave."""

    def __init__(self):
        super().__init__()
        self.first, self.above, self.below = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return torch.cond(x.sum() > 0, lambda x: self.above(x).relu(), lambda x: self.below(x * x), (x,))


def float_model():
    torch.manual_seed(0)
    return Branches().eval()


def prepared():
    quantizer = quantplug.get_quantizer("xnnpack")
    quantizer.set_global(quantplug.get_symmetric_quantization_config(observer="mse"))
    with torch.no_grad():
        exported = torch.export.export(float_model(), (torch.ones(2, 4),)).module()
    return quantplug.prepare_pt2e(exported, quantizer)


def ranges(model):
    """Returns the ends that each observer of activations found, by its name."""
    places = [place for place in observer_places(model) if not place.of_constants]
    return {place.name: [end.tolist() for end in place.observer.ranges()] for place in places}


def batches(above, count=6):
    """Returns batches for which the model takes the branch "above", or the other one."""
    generator, layer = torch.Generator().manual_seed(1), float_model().first
    drawn = (torch.randn(2, 4, generator=generator) for _ in range(1000))
    return [batch for batch in drawn if bool(layer(batch).sum() > 0) == above][:count]


def mixed():
    return [batch for pair in zip(batches(True), batches(False), strict=True) for batch in pair]


def by_plain_forward():
    model = prepared()
    with torch.no_grad():
        for batch in mixed():
            model(batch)
    return model


def test_observers_of_both_branches_see_what_a_plain_loop_shows_them():
    model = prepared()
    result = calibrate(model, mixed())
    assert ranges(model) == ranges(by_plain_forward())
    assert {summary.name.rpartition(".")[0] for summary in result.observers} == {"", "true_graph_0", "false_graph_0"}
    assert len({summary.place for summary in result.observers}) == len(result.observers)


def test_a_branch_that_was_never_taken_is_named():
    found = calibrate(prepared(), batches(above=True)).observers
    assert {summary.name.split(".")[0] for summary in found if summary.dead} == {"false_graph_0"}
    with pytest.raises(CalibrationError, match=r"No data reached the observers of .* in 'false_graph_0'"):
        calibrate(prepared(), batches(above=True), dead="raise")


def test_what_a_branch_saw_of_a_bad_batch_is_undone():
    overflowing = batches(above=False)[0] * 1e25
    model = prepared()
    with pytest.raises(NonFiniteError, match="in 'false_graph_0'"):
        calibrate(model, [*mixed(), overflowing])
    assert not any(place.observer.has_data for place in observer_places(model))
    assert len(calibrate(model, [*mixed(), overflowing], nonfinite="skip").skipped) == 1
    assert ranges(model) == ranges(by_plain_forward())


def test_a_resumed_run_has_the_branches_of_the_interrupted_one(tmp_path):
    def dying():
        yield from mixed()[:5]
        raise KeyboardInterrupt

    path = tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        calibrate(prepared(), dying(), checkpoint=path, checkpoint_every=1)
    model = prepared()
    assert calibrate(model, mixed(), checkpoint=path).resumed_at == 5
    assert ranges(model) == ranges(by_plain_forward())
