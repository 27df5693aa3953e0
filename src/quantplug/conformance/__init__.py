"""The conformance kit: does a backend keep what it declares?

Before: a backend's declaration. After: a verdict for each rule, config, form of the rule and promise. On the
command line: `pytest --quantplug-backend NAME`.
"""

from collections.abc import Iterator
from itertools import groupby

from quantplug.conformance.checks import CHECKS, judge
from quantplug.conformance.judging import Verdict
from quantplug.conformance.trial import Trial, trials
from quantplug.quantizers.framework.backend import Backend

__all__ = ["CHECKS", "Trial", "Verdict", "judge", "trials", "verdicts"]


def verdicts(backend: Backend, *rules: str) -> Iterator[tuple[str, str, Verdict]]:
    """Yields the test name, the check and the verdict of everything that a backend declares.

    Args:
        backend: the declaration.
        rules: labels of the rules to try; all of them if none is given.
    """
    for panel, together in groupby(trials(backend, *rules), key=lambda trial: trial.panel):
        for trial in together:
            yield from ((trial.name, check, judge(trial, check)) for check in CHECKS)
        panel.release()
