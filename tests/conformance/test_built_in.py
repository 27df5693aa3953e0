"""The built-in backends keep what they declare of a few rules; `pytest --quantplug-backend NAME` tries all of them."""

import pytest

from quantplug import get_quantizer
from quantplug.conformance import verdicts


@pytest.mark.parametrize(("name", "rules"), [("xnnpack", ("add",)), ("x86", ("linear_relu", "view"))])
def test_b26_r05_a_built_in_backend_keeps_what_it_declares_of_a_few_rules(name, rules):
    found = list(verdicts(get_quantizer(name).backend, *rules))
    assert any(verdict.status == "passed" for _, _, verdict in found)
    assert not [f"{test}-{check}: {v.reason}" for test, check, v in found if v.status == "failed"]
