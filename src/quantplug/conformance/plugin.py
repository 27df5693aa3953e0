"""The pytest plugin: `pytest --quantplug-backend NAME`, `pytest --quantplug-quantizer package.module:factory`.

Before: the name of an installed backend, or of what makes a quantizer of anybody's, with the partitioners or the
function that its graphs are lowered through. After: one test for each form of a rule and check, such as
`xnnpack-int8-conv_relu-aten.conv2d.default-static-annotated` or `XNNPACKQuantizer-conv2d-module-0-spelled`. Without
paths on the command line nothing else is collected; `-k` selects among the tests as usual.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from quantplug.core.errors import QuantplugError

if TYPE_CHECKING:
    from quantplug.conformance import Verdict

_BESIDE = ("partitioner", "lowering", "steps")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("quantplug", "backends of quantplug, and quantizers of anybody's")
    group.addoption(
        "--quantplug-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="Test that this installed backend keeps what it declares; can be given several times.",
    )
    group.addoption(
        "--quantplug-quantizer",
        metavar="PACKAGE.MODULE:FACTORY",
        help="Test what this torchao Quantizer annotates; the factory is its class or a function that configures it.",
    )
    group.addoption(
        "--quantplug-partitioner",
        action="append",
        default=[],
        metavar="PACKAGE.MODULE:FACTORY",
        help="Lower its graphs to ExecuTorch through this partitioner; can be given several times.",
    )
    group.addoption(
        "--quantplug-lowering",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="Lower its graphs by this function of a q/dq graph and its example inputs, which returns a callable.",
    )
    group.addoption(
        "--quantplug-steps",
        type=int,
        metavar="N",
        help="How many steps of a result's scale programs may be off the q/dq graph (default: 1).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leaves out test files that nobody named when something is judged, and torch's debug log from what failed.

    Raises:
        pytest.UsageError: an option that is about a quantizer is given without one.
    """
    quantizer = config.getoption("quantplug_quantizer")
    if lone := [name for name in _BESIDE if config.getoption(f"quantplug_{name}") and not quantizer]:
        raise pytest.UsageError(
            f"--quantplug-{lone[0]} is about a quantizer, and none is given; add --quantplug-quantizer."
        )
    if not quantizer and not config.getoption("quantplug_backend"):
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    config.option.log_level = config.option.log_level or "WARNING"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the tests of the backends and the quantizer that the command line names."""
    for name in config.getoption("quantplug_backend"):
        items += JudgedTests.of(session, f"quantplug-backend {name}", partial(_backend, name))
    if quantizer := config.getoption("quantplug_quantizer"):
        items += JudgedTests.of(session, f"quantplug-quantizer {quantizer}", lambda: _candidate(config))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forgets the model that a trial is in where the next test is about another."""
    panel = getattr(item, "panel", None)
    if panel is not None and getattr(nextitem, "panel", None) is not panel:
        panel.release()


def _backend(name: str) -> Any:
    from quantplug.quantizers.framework.registry import get_quantizer

    return get_quantizer(name).backend


def _candidate(config: pytest.Config) -> Any:
    from quantplug.conformance.candidate import Candidate

    names = {name: config.getoption(f"quantplug_{name}") for name in ("quantizer", "partitioner", "lowering", "steps")}
    steps = 1 if names["steps"] is None else names["steps"]
    return Candidate.named(names["quantizer"], tuple(names["partitioner"]), names["lowering"], steps)


class JudgedTests(pytest.Collector):
    """The tests of one backend or quantizer."""

    def __init__(self, *, subject: Callable[[], Any], **fields: Any) -> None:
        super().__init__(**fields)
        self._subject = subject

    @classmethod
    def of(cls, session: pytest.Session, name: str, subject: Callable[[], Any]) -> list[pytest.Item]:
        """Returns a test for each form and each check of what is judged.

        Raises:
            pytest.UsageError: there is no such backend or quantizer, or it is broken.
        """
        made: list[pytest.Item] = cls.from_parent(session, name=name, nodeid=name, subject=subject).collect()
        return made

    def collect(self) -> list[pytest.Item]:
        """Returns the tests.

        Raises:
            pytest.UsageError: there is no such backend or quantizer, or it is broken.
        """
        # torch is imported where it is needed: every pytest run of an environment loads its plugins.
        from quantplug.conformance import judging_of

        try:
            found, checks, judge = judging_of(self._subject())
        except QuantplugError as error:
            raise pytest.UsageError(str(error)) from error
        return [
            ConformanceTest.from_parent(self, name=f"{trial.name}-{check}", trial=trial, check=check, judge=judge)
            for trial in found
            for check in checks
        ]


class ConformanceTest(pytest.Item):
    """One check of one form."""

    def __init__(self, *, trial: Any, check: str, judge: "Callable[[Any, str], Verdict]", **fields: Any) -> None:
        super().__init__(**fields)
        self.trial, self.check, self._judge = trial, check, judge

    @property
    def panel(self) -> Any:
        """The trials that share a model with this one."""
        return self.trial.panel

    def runtest(self) -> None:
        """Fails with the reason against it, or skips what nobody claims."""
        verdict = self._judge(self.trial, self.check)
        if verdict.status == "skipped":
            pytest.skip(verdict.reason)
        if verdict.status == "failed":
            pytest.fail(verdict.reason, pytrace=False)

    def reportinfo(self) -> tuple[Any, None, str]:
        """Returns how the test is called in reports."""
        return self.path, None, self.name
