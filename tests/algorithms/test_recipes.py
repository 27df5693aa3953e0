"""Recipes: algorithms by name or one after the other, each on the graph that it is for."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import quantplug
from quantplug.algorithms.recipe import RECIPES, STAGES, CorrectBiases, recipe_of
from quantplug.core.errors import ConfigError
from quantplug.core.specs.levels import sqnr


def batches(count=4, first=0):
    mix = torch.randn(16, 16, generator=torch.Generator().manual_seed(7))
    return [torch.randn(16, 16, generator=torch.Generator().manual_seed(first + seed)) @ mix for seed in range(count)]


def perceptron(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


@dataclass
class Halving:
    """An algorithm of a user's own: it halves the float model's last weight."""

    stage: ClassVar[str] = "float"

    def apply(self, model, loader, *, inputs=None):
        weight = model.get_parameter("4.weight")
        model.get_submodule("4").weight = nn.Parameter(weight.detach() / 2)
        return f"halved, on {len(loader)} batches"


def test_an_algorithm_of_a_users_own_changes_a_copy_before_annotation():
    model, data = perceptron(), batches()
    exported = torch.export.export(model, (data[0],)).module()
    before = {name: value.clone() for name, value in exported.state_dict().items()}
    artefact = quantplug.quantize(exported, (data[0],), "x86", data, recipe=[Halving()], progress=False)
    wanted = nn.functional.linear(model[:4](data[1]), model[4].weight / 2, model[4].bias)
    assert sqnr(artefact(data[1]), wanted) > 25
    assert artefact.applied == ("halved, on 4 batches",)
    assert all(torch.equal(value, before[name]) for name, value in exported.state_dict().items())


@pytest.mark.slow
def test_the_accurate_recipe_keeps_more_of_few_bits_and_says_what_it_did():
    gains = []
    for seed in range(4):  # what one net of random numbers gains differs by 2 dB
        model, data, fresh = perceptron(seed), batches(first=1000 * seed), batches(1, first=1000 * seed + 50)[0]
        levels = {}
        for recipe in ("fast", "accurate"):
            artefact = quantplug.quantize(
                model, (fresh,), "xnnpack", data, "int4_dynamic", recipe=recipe, progress=False
            )
            levels[recipe] = sqnr(artefact(fresh), model(fresh))
            assert len(artefact.applied) == len(RECIPES[recipe])
            assert all(str(done).endswith(".") for done in artefact.applied)
        gains.append(levels["accurate"] - levels["fast"])
    assert sum(gains) / len(gains) > 3


def test_what_is_no_recipe_is_refused_before_anything_is_done():
    with pytest.raises(ConfigError, match=r"no recipe 'acurate'; choose one of \['fast', 'accurate'\]"):
        recipe_of("acurate")
    for wrong in (None, 3, [quantplug.GPTQ], ["accurate"], {"recipe": 1}, [object()]):
        with pytest.raises(ConfigError, match="A recipe is a list of algorithms"):
            recipe_of(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="need calibration batches, found none"):
        quantplug.quantize(perceptron(), (batches(1)[0],), config="int4_dynamic", recipe="accurate")


def test_an_order_that_undoes_what_was_done_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="GPTQ changes the calibrated graph, and stands behind CorrectBiases"):
        recipe_of([CorrectBiases(), quantplug.GPTQ()])
    with pytest.raises(ConfigError, match=r"Halving changes the exported float graph, and stands behind GPTQ.*first"):
        recipe_of([quantplug.GPTQ(), Halving()])
    assert recipe_of([Halving(), Halving(), quantplug.GPTQ(), CorrectBiases()])
    assert {each.stage for recipe in RECIPES.values() for each in recipe} <= STAGES.keys()


def test_biases_are_corrected_once_where_a_recipe_and_an_option_ask_for_it():
    model, data = perceptron(), batches()
    artefact = quantplug.quantize(model, (data[0],), "x86", data, recipe="fast", correct_bias=True, progress=False)
    assert len(artefact.applied) == 1


def test_one_that_does_nothing_is_told_where_it_was_asked_for_by_itself(recwarn):
    model, data = nn.Sequential(nn.Linear(8, 8, bias=False)).eval(), [torch.randn(16, 8) for _ in range(4)]
    quantplug.quantize(model, (data[0],), "x86", data, recipe="fast", progress=False)
    assert not [warned for warned in recwarn if "bias" in str(warned.message)]
    with pytest.warns(UserWarning, match="No layer has a bias of its own to correct"):
        quantplug.quantize(model, (data[0],), "x86", data, recipe=[CorrectBiases()], progress=False)
