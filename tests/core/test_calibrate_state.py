"""Models that write their buffers: a run goes through their state batch by batch, and gives it back."""

import pytest
import torch
from calibration_models import ConvLinearQuantizer
from torch import nn

import quantplug
from quantplug.core.calibration.calibrate import calibrate
from quantplug.core.calibration.observer_places import observer_places
from quantplug.core.observers import NonFiniteError, observer


class Remembers(nn.Module):
    """A linear layer on the input and on what it gave before."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        nn.init.ones_(self.layer.weight)  # a sum of four can overflow
        self.register_buffer("last", torch.ones(2, 4))

    def forward(self, x):
        y = self.layer(x + self.last)
        self.last.copy_(y)
        return y


def prepared():
    torch.manual_seed(0)
    model = torch.export.export(Remembers().eval(), (torch.ones(2, 4),)).module()
    return quantplug.prepare_pt2e(model, ConvLinearQuantizer(observer("mse"), observer("minmax", per_channel=True)))


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) * (1 + i) for i in range(count)]


def ranges(model):
    return [[end.tolist() for end in s.observer.ranges()] for s in observer_places(model) if not s.of_constants]


def by_plain_forward():
    model = prepared()
    with torch.no_grad():
        for batch in batches():
            model(batch)
    return model


def test_state_goes_from_batch_to_batch_and_is_given_back():
    model = prepared()
    calibrate(model, batches())
    assert ranges(model) == ranges(by_plain_forward())
    assert torch.equal(model.last, torch.ones(2, 4))


def test_a_batch_that_is_skipped_leaves_no_state_behind():
    overflowing, model = torch.full((2, 4), 3e38), prepared()
    found = calibrate(model, [*batches()[:3], overflowing, *batches()[3:]], nonfinite="skip")
    assert [skipped.index for skipped in found.skipped] == [3]
    assert ranges(model) == ranges(by_plain_forward())
    with pytest.raises(NonFiniteError):
        calibrate(model, [*batches(), overflowing])
    assert torch.equal(model.last, torch.ones(2, 4))


def test_a_resumed_run_goes_on_from_the_state_of_the_interrupted_one(tmp_path):
    def dying():
        yield from batches()[:4]
        raise KeyboardInterrupt

    path = tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        calibrate(prepared(), dying(), checkpoint=path, checkpoint_every=2)
    model = prepared()
    assert calibrate(model, batches(), checkpoint=path).resumed_at == 4
    assert ranges(model) == ranges(by_plain_forward())
