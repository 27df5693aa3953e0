"""What a declaration means for its configs, and what is none."""

import pytest
import torch

from quantplug.annotators.linear import linear
from quantplug.annotators.presets import config_for
from quantplug.core.dtypes import DTypeConfig, DTypeWithConstraints
from quantplug.core.errors import ConfigError

UINT8 = DTypeWithConstraints(torch.uint8)


def test_b14_the_scheme_that_a_weight_begins_with_is_the_one_of_its_config():
    for scheme in (torch.per_channel_affine, torch.per_tensor_affine, torch.per_channel_symmetric):
        weight = DTypeWithConstraints(torch.int8, qschemes=(scheme,))
        spec = config_for(DTypeConfig("it", input=UINT8, output=UINT8, weight=weight)).weight
        assert spec.qscheme is scheme
        assert spec.quant_min == (-127 if scheme is torch.per_channel_symmetric else -128)


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: linear().where("at most"), "'linear' has the constraint 'at most'; give a function"),
        (lambda: linear().within("exact"), "'linear' has level 'exact'; choose one of"),
        (lambda: linear().shown_by(3), "'linear' has the example 3; give a function"),
        (lambda: DTypeWithConstraints(torch.int8, qschemes=("affine",)), "the scheme 'affine'; give one like"),
    ],
)
def test_r01_what_is_no_declaration_is_an_error_where_it_is_written(declare, words):
    with pytest.raises(ConfigError, match=words):
        declare()
