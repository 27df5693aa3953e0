"""Lint, format and strict types are part of the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["mypy", "--no-error-summary"],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("check", COMMANDS)
def test_style(check):
    done = subprocess.run(
        [sys.executable, "-m", *COMMANDS[check]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
