"""What tests need beside the package's own dependencies: a machine without it skips them, CI must not."""

import importlib.util
import os
from types import ModuleType

import pytest
import vision

REQUIRED = "QUANTPLUG_REQUIRE_EXTRAS"


def torchvision_models() -> ModuleType:
    """Returns torchvision's models; skips the test where torchvision is missing."""
    _require("torchvision")
    return vision.torchvision_models()


def transformers_module(name: str = "transformers") -> ModuleType:
    """Returns a module of transformers; skips the test where transformers is missing."""
    if importlib.util.find_spec("torchvision"):  # transformers imports it where it is installed
        vision.torchvision_models()
    _require("transformers")
    return importlib.import_module(name)


def _require(package: str) -> None:
    if importlib.util.find_spec(package):
        return
    reason = f"{package} is in the extra 'bench', which 'dev' has"
    pytest.fail(reason) if os.environ.get(REQUIRED) else pytest.skip(reason)
