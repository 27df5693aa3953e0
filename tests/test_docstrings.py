"""What the two faces have says what it takes: every argument, every field, and what it raises by itself."""

import ast
import dataclasses
import inspect
import re
import textwrap

import pytest

import quantplug
from quantplug import plugin


def functions():
    """Yields (name, function) of all public functions, and of the public methods of public classes."""
    for face in (quantplug, plugin):
        for name in face.__all__:
            found = getattr(face, name)
            if inspect.isfunction(found):
                yield name, found
            elif inspect.isclass(found) and found.__module__.startswith("quantplug"):
                yield from ((f"{name}.{part}", method) for part, method in methods(found))


def methods(owner):
    for name, found in inspect.getmembers(owner):
        function = inspect.unwrap(found) if callable(found) else found
        if not name.startswith("_") and inspect.isfunction(function) and function.__module__.startswith("quantplug"):
            yield name, function


# Each once, where classes inherit it.
FUNCTIONS = {name: found for found, name in {found: name for name, found in functions()}.items()}
CLASSES = {
    name: found
    for face in (quantplug, plugin)
    for name in face.__all__
    if inspect.isclass(found := getattr(face, name))
    and dataclasses.is_dataclass(found)
    and found.__module__.startswith("quantplug")
}


def objections(function):
    """Yields what the docstring of a function leaves out."""
    said = inspect.getdoc(function) or ""
    parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    missing = [name for name in parameters if not re.search(rf"    \**{name}: ", said)]
    if len(parameters) > 1 or (parameters and not inspect.isfunction(function)):
        yield from (f"argument '{name}'" for name in missing)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    raises = [n for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc is not None]
    if raises and "Raises:" not in said:
        yield "what it raises"
    if not said:
        yield "everything"


def test_there_is_much_to_look_at():
    assert len(FUNCTIONS) > 150
    assert len(CLASSES) > 15


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_and_raises(name):
    assert list(objections(FUNCTIONS[name])) == []


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_says_what_its_fields_are(name):
    said = "".join(inspect.getdoc(owner) or "" for owner in CLASSES[name].__mro__)
    fields = [field.name for field in dataclasses.fields(CLASSES[name]) if not field.name.startswith("_")]
    assert [field for field in fields if f"    {field}: " not in said] == []


def test_what_is_left_out_is_seen():
    def halved(number: int, by: int) -> float:
        """Returns a number divided.

        Args:
            number: any.
        """
        if not by:
            raise ValueError
        return number / by

    assert list(objections(halved)) == ["argument 'by'", "what it raises"]
