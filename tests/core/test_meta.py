"""Notes on nodes and graph modules: no key of ours is known outside of the file that owns them."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import fx

from quantplug.core.graph import meta
from quantplug.core.graph.meta import LIMITS, NOTES, ORIGINS, REASON, Note, absorb, origins

ROOT = Path(__file__).parent.parent.parent
FILES = sorted(
    path
    for room in ("core", "annotators", "lowering", "quantizers", "src/quantplug", "tests", "benchmarks", "examples")
    for path in (ROOT / room).rglob("*.py")
    if path not in (ROOT / "core" / "graph" / "meta.py", Path(__file__))
)
ALL = {name: found for name, found in vars(meta).items() if isinstance(found, Note)}
READERS = ("get", "pop", "setdefault")


def _is_meta(node):
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def _keys(tree):
    """Yields every expression that stands where a key of a `meta` does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _is_meta(node.value):
            yield node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_meta(node.func.value):
            yield from node.args[:1] if node.func.attr in READERS else ()
            yield from (key for given in node.args if isinstance(given, ast.Dict) for key in given.keys)
        elif isinstance(node, ast.Compare) and any(map(_is_meta, node.comparators)):
            yield node.left
        elif isinstance(node, (ast.Assign, ast.AugAssign)) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from node.value.keys if any(map(_is_meta, targets)) else ()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_file_knows_a_key_of_ours(path):
    text = path.read_text()
    known = {note.key for note in ALL.values() if note.key.startswith("quantplug_")}
    held = {key for key in known if re.search(rf"""["']{key}["']""", text)}
    assert not held, f"{path} holds {held}; take the note of core/graph/meta.py"
    for key in _keys(ast.parse(text)):
        is_ours = isinstance(key, ast.Constant) and str(key.value).startswith("quantplug_")
        assert not is_ours, f"{path}:{key.lineno} indexes a meta with a key of its own; make it a note"
        by_note = (isinstance(key, ast.Attribute) and key.attr == "key") or getattr(key, "id", "") in ALL
        assert not by_note, f"{path}:{key.lineno} indexes a meta with a note; call its get, put, drop or on"


def test_every_note_has_a_key_of_its_own_and_says_what_it_is():
    assert len({note.key for note in ALL.values()}) == len(ALL) > 20
    assert all(note.says for note in ALL.values())
    assert [name for name, note in ALL.items() if not note.key.startswith("quantplug_")] == ["SOURCE"]


@pytest.mark.parametrize("on_node", [True, False], ids=["node", "graph module"])
def test_a_note_is_put_read_and_dropped(on_node):
    model = fx.symbolic_trace(torch.nn.ReLU())
    holder = next(iter(model.graph.nodes)) if on_node else model
    before = dict(holder.meta)
    assert not NOTES.on(holder)
    assert NOTES.get(holder) is None
    assert NOTES.get(holder, ("none",)) == ("none",)
    assert holder.meta == before, "to read a note leaves nothing"
    NOTES.put(holder, ("one",))
    NOTES.put(holder, ("two",))
    assert NOTES.on(holder)
    assert NOTES.get(holder, ()) == ("two",)
    assert holder.meta == {**before, "quantplug_notes": ("two",)}
    assert not REASON.on(holder)
    assert not LIMITS.on(holder)
    assert NOTES.drop(holder) == ("two",)
    assert NOTES.drop(holder) is None
    assert holder.meta == before


def test_a_kernel_takes_over_the_origins_of_what_it_absorbs():
    first, second, third = fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())).graph.nodes
    assert origins(first) == frozenset()
    ORIGINS.put(first, frozenset({"a"}))
    ORIGINS.put(second, frozenset({"b"}))
    absorb(third, first, second)
    assert origins(third) == {"a", "b"}
    assert origins(first) == {"a"}
