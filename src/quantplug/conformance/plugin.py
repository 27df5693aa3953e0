"""The pytest plugin: `pytest --quantplug-backend NAME` tests what a backend declares.

Before: the name of an installed backend. After: one test for each rule, config, form and check, such as
`xnnpack-int8-conv_relu-aten.conv2d.default-static-annotated`. Without paths on the command line nothing else is
collected; `-k` selects among the tests as usual.
"""

from typing import TYPE_CHECKING, Any

import pytest

from quantplug.core.errors import QuantplugError

if TYPE_CHECKING:
    from quantplug.conformance.trial import Panel, Trial


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    group = parser.getgroup("quantplug", "backends of quantplug")
    group.addoption(
        "--quantplug-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="Test that this installed backend keeps what it declares; can be given several times.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leaves out test files that nobody named when a backend is tested, and torch's debug log from what failed."""
    if not config.getoption("quantplug_backend"):
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    config.option.log_level = config.option.log_level or "WARNING"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the tests of the backends that the command line names."""
    for name in config.getoption("quantplug_backend"):
        items += BackendTests.from_parent(session, name=name, nodeid=f"quantplug-backend {name}").collect()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forgets the model that a trial is in where the next test is about another."""
    panel = getattr(item, "panel", None)
    if panel is not None and getattr(nextitem, "panel", None) is not panel:
        panel.release()


class BackendTests(pytest.Collector):
    """The tests of one backend."""

    def collect(self) -> list[pytest.Item]:
        """Returns a test for each form of each rule and each check.

        Raises:
            pytest.UsageError: there is no such backend, or it is broken.
        """
        # torch is imported where it is needed: every pytest run of an environment loads its plugins.
        from quantplug.conformance.checks import CHECKS
        from quantplug.conformance.trial import trials
        from quantplug.quantizers.framework.registry import get_quantizer

        try:
            backend = get_quantizer(self.name).backend
        except QuantplugError as error:
            raise pytest.UsageError(str(error)) from error
        made = trials(backend)
        return [ConformanceTest.from_parent(self, name=f"{t.name}-{c}", trial=t, check=c) for t in made for c in CHECKS]


class ConformanceTest(pytest.Item):
    """One check of one form of a rule."""

    def __init__(self, *, trial: "Trial", check: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.trial, self.check = trial, check

    @property
    def panel(self) -> "Panel":
        """The trials that share a model with this one."""
        return self.trial.panel

    def runtest(self) -> None:
        """Fails with the reason against the backend, or skips what it does not claim."""
        from quantplug.conformance.checks import judge

        verdict = judge(self.trial, self.check)
        if verdict.status == "skipped":
            pytest.skip(verdict.reason)
        if verdict.status == "failed":
            pytest.fail(verdict.reason, pytrace=False)

    def reportinfo(self) -> tuple[Any, None, str]:
        """Returns how the test is called in reports."""
        return self.path, None, self.name
