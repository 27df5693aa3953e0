"""docs/requirements.md: every requirement in order, each with tests that exist, and no test with a number left out."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "requirements.md").read_text()
ROWS = {"B": 26, "E": 19, "R": 28, "Q": 16}
IDS = [f"{letter}{number:02}" for letter, rows in ROWS.items() for number in range(1, rows + 1)]


def functions() -> set[str]:
    """Returns the test functions of all files as `path::name`, without importing any."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        nodes = ast.walk(ast.parse(path.read_text()))
        names = (node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        found |= {f"{place}::{name}" for name in names if name.startswith("test_")}
    return found


def numbers(test: str) -> set[str]:
    """Returns the ids in a test's name."""
    return {found.upper() for found in re.findall(r"_([berq]\d\d)(?=_|$)", test.partition("::")[2])}


def rows(page: str) -> list[tuple[str, set[str]]]:
    """Returns the id and the tests of each row."""
    cells = (line.strip("|").split(" | ") for line in page.splitlines() if re.match(r"\| [A-Z]\d\d \|", line))
    return [(first.strip(), set(re.findall(r"`([^`]+::[^`]+)`", tests))) for first, _, tests in cells]


def defects(page: str, tests: set[str]) -> list[str]:
    found = rows(page)
    ids = [name for name, _ in found]
    wrong = [] if ids == IDS else [f"ids are {ids}, not {IDS}"]
    wrong += [f"{name} has no test" for name, proofs in found if not proofs]
    wrong += [f"{name} names {proof}, which is not there" for name, proofs in found for proof in sorted(proofs - tests)]
    places = {test: {name for name, proofs in found if test in proofs} for test in sorted(tests)}
    return wrong + [
        f"{test} stands in the rows {sorted(places[test])}, not {sorted(numbers(test))}"
        for test in places
        if numbers(test) and places[test] != numbers(test)
    ]


def test_every_requirement_is_proved_by_tests_that_exist_and_every_number_of_a_test_stands_here():
    assert defects(PAGE, functions()) == []


A, B, C = "tests/a.py::test_b01_one", "tests/a.py::test_b02_two", "tests/b.py::test_three"
LIES = {
    "a test that is not there": (lambda page: page.replace(C, f"{C}s"), "B03 names tests/b.py::test_threes"),
    "a test left out": (lambda page: page.replace(A, C), f"{A} stands in the rows [], not ['B01']"),
    "a test in another row": (
        lambda page: page.replace(C, f"{C}`<br>`{A}", 1),
        f"{A} stands in the rows ['B01', 'B03'], not ['B01']",
    ),
    "no test": (lambda page: page.replace(f"`{C}`", ""), "B03 has no test"),
    "a row left out": (lambda page: page.replace(f"| B03 | w | `{C}` |", ""), "ids are ['B01', 'B02', 'B04'"),
    "a row twice": (lambda page: f"| B01 | w | `{A}` |\n{page}", "ids are ['B01', 'B01', 'B02'"),
    "rows in another order": (lambda page: "\n".join(reversed(page.splitlines())), "ids are ['Q16', 'Q15'"),
}


def made() -> str:
    tests = {"B01": A, "B02": B}
    return "\n".join(f"| {name} | w | `{tests.get(name, C)}` |" for name in IDS)


@pytest.mark.parametrize("lie", LIES)
def test_a_page_that_says_what_is_not_so_fails(lie):
    change, sentence = LIES[lie]
    assert defects(made(), {A, B, C}) == []
    found = defects(change(made()), {A, B, C})
    assert any(each.startswith(sentence) for each in found)
