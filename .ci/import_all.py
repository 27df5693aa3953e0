"""Imports every module of the quantplug that lies in the folder given, and of no other."""

import importlib
import pkgutil
import sys
from pathlib import Path

import quantplug

expected = Path(sys.argv[1]).resolve()
found = Path(quantplug.__file__).resolve()
if expected not in found.parents:
    sys.exit(f"quantplug was imported from {found}, not from {expected}")
names = [module.name for module in pkgutil.walk_packages(quantplug.__path__, "quantplug.")]
for name in names:
    importlib.import_module(name)
for name in quantplug.__all__:
    getattr(quantplug, name)
print(f"imported {len(names)} modules and {len(quantplug.__all__)} public names from the wheel")
