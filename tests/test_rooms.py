"""The rooms: imports run one way, nobody takes another room's private names or a peer's."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "core": {"core"},
    "annotators": {"core", "annotators"},
    "lowering": {"core", "lowering"},
    "quantizers": {"core", "annotators", "lowering", "quantizers"},
}
FILES = [(room, path) for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]
# Peers' private names that have no public counterpart, each with its reason at the place of use.
FORBIDDEN_PEERS = (
    "torchao.quantization.pt2e.prepare",
    "torchao.quantization.pt2e.convert",
    "torchao.quantization.pt2e.qat_utils",
    "torchao.quantization.pt2e.constant_fold",
    "torchao.quantization.pt2e.quantize_pt2e",
    "torch.ao.quantization",
)


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize(("room", "path"), FILES, ids=lambda v: str(v.relative_to(ROOT)) if isinstance(v, Path) else v)
def test_imports_run_one_way(room, path):
    for module, name in _imports(path):
        parts = module.split(".")
        if parts[0] != "quantplug":
            assert not module.startswith(FORBIDDEN_PEERS), f"{path} imports {module}"
            continue
        assert parts[1] in MAY_IMPORT[room], f"{path} of room '{room}' imports {module}"
        other_room = parts[1] != room
        assert not (other_room and name.startswith("_")), f"{path} takes the private name {name} of {module}"


def test_every_room_is_linked_into_the_package():
    for room in MAY_IMPORT:
        link = ROOT / "src" / "quantplug" / room
        assert link.is_symlink()
        assert link.resolve() == (ROOT / room).resolve()
