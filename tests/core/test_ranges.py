"""Scale and zero point of many observers at once, against each observer asked by itself."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchao.quantization.pt2e import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
)

from quantplug.core.observers.torchao_histogram import calculate_qparams_together


class Doubled(MinMaxObserver):
    """An observer with a rule of its own."""

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns twice the scale."""
        scale, zero_point = super().calculate_qparams()
        return 2 * scale, zero_point


TENSORS = {"dtype": torch.int8, "quant_min": -128, "quant_max": 127}
CHOICES = [
    lambda: MinMaxObserver(qscheme=torch.per_tensor_affine, **TENSORS),
    lambda: MinMaxObserver(qscheme=torch.per_tensor_symmetric, **TENSORS),
    lambda: MinMaxObserver(qscheme=torch.per_tensor_symmetric, dtype=torch.uint8, quant_min=0, quant_max=255),
    lambda: MinMaxObserver(qscheme=torch.per_tensor_symmetric, dtype=torch.uint8),
    lambda: MinMaxObserver(qscheme=torch.per_tensor_affine, dtype=torch.uint8, quant_min=0, quant_max=127, eps=0.01),
    lambda: MovingAverageMinMaxObserver(qscheme=torch.per_tensor_affine, **TENSORS),
    lambda: PerChannelMinMaxObserver(ch_axis=0, qscheme=torch.per_channel_symmetric, **TENSORS),
    lambda: PerChannelMinMaxObserver(ch_axis=1, qscheme=torch.per_channel_affine, **TENSORS),
    lambda: Doubled(qscheme=torch.per_tensor_affine, **TENSORS),
    lambda: HistogramObserver(qscheme=torch.per_tensor_affine, **TENSORS),
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(CHOICES) - 1), st.floats(-30, 30), st.floats(1e-9, 1e4)), max_size=12))
def test_observers_asked_together_answer_as_each_alone(drawn: list[tuple[int, float, float]]) -> None:
    observers: list[nn.Module] = []
    for index, shift, width in drawn:
        observers.append(CHOICES[index]())
        observers[-1](torch.randn(3 + index, 4) * width + shift)
    together = calculate_qparams_together(observers)
    assert {type(o) for o in observers if o not in together} <= {Doubled, HistogramObserver}
    for observer, (scale, zero_point) in together.items():
        alone = observer.calculate_qparams()
        for one, other in zip((scale, zero_point), alone, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            assert one.untyped_storage().nbytes() == one.numel() * one.element_size()


def test_groups_with_unusable_statistics_are_left_to_each_observer() -> None:
    good, unseen, poisoned = (CHOICES[0]() for _ in range(3))
    good(torch.randn(5))
    poisoned(torch.tensor([1.0, float("nan")]))
    assert calculate_qparams_together([good]).keys() == {good}
    assert not calculate_qparams_together([good, unseen])
    assert not calculate_qparams_together([good, poisoned])
    assert not calculate_qparams_together([CHOICES[6]()])
