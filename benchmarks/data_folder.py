"""The folder of trained models and data that accuracy is measured on."""

import importlib.util
from pathlib import Path
from types import ModuleType


def module_of(folder: Path, name: str) -> ModuleType:
    """Imports one of the folder's modules.

    Raises:
        SystemExit: the folder has no such file.
    """
    path = folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"measured_{name}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{folder} holds no {path.name}; give the folder that has it with --data.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
