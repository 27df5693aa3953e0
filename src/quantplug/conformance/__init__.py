"""The conformance kit: does a backend keep what it declares, and a quantizer what holds for any?

Before: a backend's declaration, or a quantizer that declares nothing. After: a verdict for each rule or operator,
form and promise. On the command line: `pytest --quantplug-backend NAME`, `pytest --quantplug-quantizer
package.module:factory`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from quantplug.conformance.candidate import Candidate
from quantplug.conformance.candidate_checks import CANDIDATE_CHECKS, candidate_trials, judge_candidate
from quantplug.conformance.checks import CHECKS, judge
from quantplug.conformance.judging import Verdict
from quantplug.conformance.trial import Trial, trials
from quantplug.quantizers.framework.backend import Backend

__all__ = ["CANDIDATE_CHECKS", "CHECKS", "Candidate", "Trial", "Verdict", "judge", "judging_of", "trials", "verdicts"]

Judging = tuple[Sequence[Any], Mapping[str, Any], Callable[[Any, str], Verdict]]


def verdicts(subject: Backend | Candidate, *rules: str) -> Iterator[tuple[str, str, Verdict]]:
    """Yields the test name, the check and the verdict of all that a backend declares, or a quantizer annotates.

    Args:
        subject: the declaration, or the quantizer that declares nothing.
        rules: labels of a backend's rules, or operators such as "conv2d" and "conv2d-relu", to try; all of them if none
            is given.

    Raises:
        ConfigError: a quantizer annotates none of the operators, or the kit does not know one of them.
    """
    found, checks, decide = judging_of(subject, *rules)
    for panel, together in groupby(found, key=lambda trial: trial.panel):
        for trial in together:
            yield from ((trial.name, check, decide(trial, check)) for check in checks)
        panel.release()


def judging_of(subject: Backend | Candidate, *rules: str) -> Judging:
    """Returns the trials of a subject, the checks that they go through, and what judges one by one of them.

    Args:
        subject: a backend or a candidate.
        rules: as for `verdicts`.

    Raises:
        ConfigError: as for `verdicts`.
    """
    if isinstance(subject, Candidate):
        return candidate_trials(subject, *rules), CANDIDATE_CHECKS, judge_candidate
    return trials(subject, *rules), CHECKS, judge
