"""Makes a failing model small: steps go while it still fails in the same way."""

import pprint
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fuzz.check import Verdict, judged
from fuzz.model import Input, Model, Step, pruned

_TEST = '''"""A model that the fuzzer found, made small: {told}"""

from fuzz.check import judged
from fuzz.model import Input, Model, Step

{model}


def test_a_model_of_the_fuzzer_is_no_suspect():
    verdict = judged(MODEL, "{backend}")
    assert verdict.outcome != "suspect", verdict.told
'''


def shrunk(model: Model, backend: str) -> Model:
    """Returns a smallest model that is a suspect in the same way."""
    kind = _kind(judged(model, backend))
    while True:
        smaller = next((each for each in _smaller(model) if _kind(judged(each, backend)) == kind), None)
        if smaller is None:
            return model
        model = smaller


def _kind(verdict: Verdict) -> str:
    return verdict.kind.split(":")[0] if verdict.outcome == "suspect" else f"no suspect: {verdict.outcome}"


def _smaller(model: Model) -> Iterator[Model]:
    """Yields models with fewer steps, the smallest first."""
    if len(model.outputs) > 1:
        for name in model.outputs:
            yield pruned(replace(model, outputs=(name,), structure="tensor"))
    for step in model.steps[:-1]:  # the end is cut off
        if model.outputs != (step.name,):
            yield pruned(replace(model, outputs=(step.name,), structure="tensor"))
    for step in reversed(model.steps):  # the front is cut off
        if step.name not in model.outputs and step.body:
            yield _fed(model, step)
    for step in model.steps:
        for other in _alike(model, step):
            yield _renamed(model, step.name, other)
    if model.strict:
        yield replace(model, strict=False)
    if model.is_dynamic:
        yield replace(model, is_dynamic=False)
    if model.config != "int8":
        yield replace(model, config="int8")


def _fed(model: Model, step: Step) -> Model:
    """Makes an input of what a step computes."""
    steps = tuple(each for each in model.steps if each.name != step.name)
    return pruned(replace(model, inputs=(*model.inputs, Input(step.name, step.shape)), steps=steps))


def _alike(model: Model, step: Step) -> list[str]:
    before = [*((i.name, i.shape) for i in model.inputs if not i.high)]
    for each in model.steps:
        if each.name == step.name:
            break
        before.append((each.name, each.shape))
    return [name for name, shape in before if shape == step.shape and name in step.reads]


def _renamed(model: Model, old: str, new: str) -> Model:
    """Lets the readers of a step read another value of its shape."""
    word = re.compile(rf"\b{old}\b")
    steps = []
    for each in model.steps:
        if each.name != old and old in each.reads:
            reads = tuple(new if name == old else name for name in each.reads)
            body = tuple(word.sub(new, line) for line in each.body)
            steps.append(replace(each, body=body, reads=reads))
        else:
            steps.append(each)
    outputs = tuple(dict.fromkeys(new if name == old else name for name in model.outputs))
    return pruned(replace(model, steps=tuple(steps), outputs=outputs))


def written(model: Model, backend: str, told: str, folder: Path) -> Path:
    """Writes a test of a model and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"test_{backend}_{model.seed}.py"
    text = "MODEL = " + pprint.pformat(model, width=110, sort_dicts=False)
    path.write_text(_TEST.format(told=told.splitlines()[0].replace('"', "'")[:90], model=text, backend=backend))
    return path
