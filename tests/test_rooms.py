"""The rooms: imports run one way, down the floors; nobody takes another room's private names or a peer's."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from quantplug.core.graph.operators import KEEPERS, schema_names

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "core": {"core"},
    "algorithms": {"core", "algorithms"},
    "annotators": {"core", "annotators"},
    "lowering": {"core", "lowering"},
    "quantizers": {"core", "annotators", "quantizers"},
}
# The rooms of core from the ground up: each knows those below it.
FLOORS = (
    "errors",
    "named",
    "extras",
    "peers",
    "files",
    "graph",
    "patterns",
    "specs",
    "qdq",
    "observers",
    "batch_norms",
    "annotation",
    "pt2e",
    "calibration",
    "report",
)
# Each target knows what belongs to none, and that knows no target.
TARGETS = {"xnnpack", "x86", "openvino", "onnx", "cortex_m", "arm"}
FILES = [(room, path) for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]
# The one file that has a peer's private names, each with the reason why there is no public way.
NAMES = {
    "torch": ROOT / "core" / "peers" / "torch_names.py",
    "torchao": ROOT / "core" / "peers" / "torchao_names.py",
    "executorch": ROOT / "lowering" / "executorch_names.py",
    "openvino": None,
    "onnx": None,
    "onnx_ir": None,
    "onnxruntime": None,
    "onnxscript": None,
    "ethosu": None,
    "tosa_reference_model": None,
}
PACKAGE = ROOT / "src" / "quantplug"
SOURCES = [path for _, path in FILES]
SOURCES += [path for path in sorted(PACKAGE.rglob("*.py")) if path.resolve().is_relative_to(PACKAGE)]
# What named tuples call their public ones.
PUBLIC_UNDERSCORES = {"_replace", "_fields"}
FORBIDDEN_PEERS = (
    "torchao.quantization.pt2e.prepare",
    "torchao.quantization.pt2e.convert",
    "torchao.quantization.pt2e.qat_utils",
    "torchao.quantization.pt2e.constant_fold",
    "torchao.quantization.pt2e.quantize_pt2e",
    "torch.ao.quantization",
)


# It owns the keys of what every floor notes on graphs, and takes only the types of the values from above.
TYPES_FROM_ABOVE = ROOT / "core" / "graph" / "meta.py"


def _imports(path, anywhere=True):
    """Yields what a file imports; or what it imports when it is imported itself."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if anywhere and path != TYPES_FROM_ABOVE else tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def _inner(path, room):
    return path.relative_to(ROOT / room).parts[0].removesuffix(".py")


def _name(value):
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else value


@pytest.mark.few(153)
@pytest.mark.parametrize(("room", "path"), FILES, ids=_name)
def test_imports_run_one_way(room, path):
    for module, name in _imports(path):
        parts = module.split(".")
        if parts[0] != "quantplug":
            assert not module.startswith(FORBIDDEN_PEERS), f"{path} imports {module}"
            continue
        # What a declaration needs of a lowering when it is used, it imports then.
        called = (
            room == "quantizers" and parts[1] == "lowering" and (module, name) not in _imports(path, anywhere=False)
        )
        assert parts[1] in MAY_IMPORT[room] or called, f"{path} of room '{room}' imports {module}"
        other_room = parts[1:3] != [room, _inner(path, room)]
        assert not (other_room and name.startswith("_")), f"{path} takes the private name {name} of {module}"


@pytest.mark.parametrize("path", [path for room, path in FILES if room == "core"], ids=_name)
def test_a_room_of_core_knows_those_below_it(path):
    own = _inner(path, "core")
    assert own == "__init__" or own in FLOORS, f"{path} stands on no floor"
    for module, name in _imports(path):
        parts = module.split(".")
        if parts[0] == "quantplug":
            found = parts[2] if len(parts) > 2 else name
            assert FLOORS.index(found) <= FLOORS.index(own), f"{path} imports {module}, which stands above it"


@pytest.mark.parametrize("path", [path for room, path in FILES if room == "lowering"], ids=_name)
def test_no_target_knows_another_one(path):
    own = _inner(path, "lowering")
    known = {module.split(".")[2] for module, _ in _imports(path) if module.startswith("quantplug.lowering.")}
    assert known & TARGETS <= {own}, f"{path} imports a target"


def test_no_room_imports_itself_through_another_one():
    """Modules that are imported with a module do not import it, so that any may be the first."""
    files = {_module(path): path for _, path in FILES}
    below = {
        name: {found for found in map(_found(files), _imports(path, anywhere=False)) if found}
        for name, path in files.items()
    }
    for name in files:
        reached, pending = set(), [*below[name]]
        while pending:
            found = pending.pop()
            if found not in reached:
                reached.add(found)
                pending += below[found]
        assert name not in reached, f"{name} imports itself through others"


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def _dotted(node):
    """Returns the names of a chain of attributes, the outermost first; none where it begins with an expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*reversed([*parts, node.id])] if isinstance(node, ast.Name) else []


def _peers_private_names(tree):
    """Yields what a file imports of a peer's private modules and names, or names in words or as attributes."""
    node: Any
    for node in ast.walk(tree):
        found: list[list[str]] = []
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [[*(node.module or "").split("."), alias.name] for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [_dotted(node)]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"\w+(\.\w+)+", str(node.value)):
            found = [str(node.value).split(".")]
        for names in found:
            # Operators are named by their schemas, some with an underscore.
            if names and names[0] in NAMES and names[:2] != ["torch", "ops"] and any(map(_is_private, names)):
                yield node.lineno, ".".join(names)


def _private_attributes(tree):
    """Yields attributes with an underscore that nothing in the file defines, so that they are another's."""
    node: Any
    own, operators = set(PUBLIC_UNDERSCORES), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _dotted(node)[:1] == ["self"]:
            own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        if isinstance(node, ast.Assign) and _dotted(node.value)[:2] == ["torch", "ops"]:
            operators.update(target.id for target in node.targets if isinstance(target, ast.Name))
    for node in ast.walk(tree):
        is_read = isinstance(node, ast.Call) and _dotted(node.func) in (["getattr"], ["hasattr"], ["setattr"])
        if is_read and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            name, holder = str(node.args[1].value), []
        elif isinstance(node, ast.Attribute):
            name, holder = node.attr, _dotted(node)
        else:
            continue
        is_operator = (holder[:1] and holder[0] in operators) or holder[:2] == ["torch", "ops"]
        if _is_private(name) and name not in own and not is_operator:
            yield node.lineno, name


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_private_names_of_peers_stand_in_one_file_each(path):
    tree = ast.parse(path.read_text())
    for line, name in _peers_private_names(tree):
        assert path == NAMES[name.partition(".")[0]], f"{path}:{line} has {name}; see the files of NAMES in this test"
    for line, name in _private_attributes(tree) if path not in NAMES.values() else ():
        raise AssertionError(f"{path}:{line} reads {name}, which is private to another; see the files of NAMES")


@pytest.mark.parametrize("peer", [peer for peer, path in NAMES.items() if path])
def test_private_names_are_those_of_the_installed_version(peer):
    (written_for,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(NAMES[peer].read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "WRITTEN_FOR"
    )
    installed = tuple(map(int, metadata.version(peer).split(".")[:2]))
    assert installed == written_for, (
        f"{peer} is {installed}, {NAMES[peer]} was written for {written_for}: see whether each name is still what it "
        "was, whether a public one came, and whether the defects that comments name with that version are mended."
    )


def _module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("quantplug", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _found(files):
    def found(imported):
        module, name = imported
        return next((each for each in (f"{module}.{name}", module) if each in files), None)

    return found


WITHOUT_LOWERINGS = """
import sys
import quantplug
from quantplug.plugin import Backend, linear, named
declared = ("xnnpack", "x86", "openvino", "onnxruntime", "tensorrt", "cortex_m", "arm", "native", "embedding")
for name in declared:
    backend = quantplug.get_quantizer(name).backend
    assert quantplug.derive(backend, "mine").rows
loaded = sorted(name for name in sys.modules if name.startswith("quantplug.lowering"))
assert not loaded, loaded
assert not {"executorch", "openvino", "onnx", "onnxruntime", "onnxscript", "ethosu"} & set(sys.modules)
pages = {f"quantplug.quantizers.{name}" for name in declared}
ours = [module for name, module in sys.modules.items() if name.startswith("quantplug.") and name not in pages]
print(sum(len(open(module.__file__).readlines()) for module in ours))
"""


@pytest.mark.slow
def test_to_declare_a_backend_imports_no_lowering():
    done = subprocess.run([sys.executable, "-c", WITHOUT_LOWERINGS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # Lines of ours that come with any declaration: a file that is cut into several weighs what it weighed.
    assert int(done.stdout.split()[-1]) < 11_500


def test_every_room_is_linked_into_the_package():
    for room in MAY_IMPORT:
        link = ROOT / "src" / "quantplug" / room
        assert link.is_symlink()
        assert link.resolve() == (ROOT / room).resolve()


TABLE = ROOT / "core" / "graph" / "operators.py"
TABLE_NAMES = {name.removeprefix("aten::") for name in schema_names(KEEPERS)}
# Inputs for each operator, and a declaration of the few that a target has.
OTHER_LISTS = {"src/quantplug/conformance/recipes.py", "quantizers/cortex_m.py"}


def _operators_named(part):
    """Yields what a list, or a call's arguments, names of the table: "relu_", "aten::relu", aten.relu.default."""
    elements = part.keys if isinstance(part, ast.Dict) else getattr(part, "args", getattr(part, "elts", ()))
    for element in elements:
        inner = element.value if isinstance(element, ast.Starred) else element
        dotted = _dotted(inner) if any("aten" in part.lower() for part in _dotted(inner)) else []
        is_text = isinstance(inner, ast.Constant) and isinstance(inner.value, str)
        text = inner.value if is_text else ".".join(dotted[-2:])
        name = text.removeprefix("aten::").partition(".")[0].removesuffix("_")
        if name in TABLE_NAMES:
            yield name


def _second_lists(text):
    """Yields the lines where a collection or call names three operators of the table or more."""
    for part in ast.walk(ast.parse(text)):
        if isinstance(part, (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Call)):
            names = set(_operators_named(part))
            if len(names) > 2:
                yield part.lineno, sorted(names)


@pytest.mark.parametrize("path", [path for path in SOURCES if path != TABLE], ids=_name)
def test_what_operators_do_to_numbers_stands_in_one_table(path):
    found = [] if _name(path) in OTHER_LISTS else [*_second_lists(path.read_text())]
    assert not found, f"{path} has a list of its own, {found}; see core/graph/operators.py"


@pytest.mark.parametrize(
    "text",
    [
        'MOVES = ("view", "permute", "flip")',
        'MOVES = {"aten::view", "aten::permute_", "aten::select"}',
        "MOVES = (aten.relu.default, torch.ops.aten.relu6.default, _ATEN.clamp_min.Tensor)",
        'found = op("relu", "hardtanh", "clamp", self=x)',
        'BOUNDS = {"relu": (0, None), "relu6": (0, 6), "clamp": ("min", "max")}',
    ],
)
def test_a_second_list_is_found(text):
    assert [*_second_lists(text)]
