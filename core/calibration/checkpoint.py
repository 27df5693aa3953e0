"""Checkpoints of a calibration run: states of observers <-> a file that is whole or absent.

A file is written beside its destination and renamed over it, so that a process killed at any moment
leaves either the old checkpoint or the new one. It holds plain tensors and numbers only and is read
with `weights_only=True`: reading a checkpoint runs no code.
"""

import io
import os
from pathlib import Path
from typing import Any

import torch

from quantplug.core.errors import ArtefactError, CalibrationError
from quantplug.core.files.whole import beside, kind_at

FORMAT = 4


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Writes a checkpoint.

    Raises:
        ArtefactError: the file cannot be written.
    """
    partial, buffer = beside(path), io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)  # its writer of files aborts on a full disk
    try:
        with partial.open("wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise ArtefactError(
            f"The calibration checkpoint '{path}' cannot be written ({error.strerror}); pass a path in a "
            "writable folder."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint, and what a killed process left of writing it."""
    for file in (path, beside(path)):
        file.unlink(missing_ok=True)


def read_checkpoint(path: Path, fingerprint: list[str]) -> dict[str, Any] | None:
    """Returns a checkpoint's content, or None if there is no file.

    Args:
        path: the file.
        fingerprint: what identifies weights and observers; must equal the writer's.

    Raises:
        ArtefactError: the file is no checkpoint.
        CalibrationError: it was written for other weights or observers.
    """
    found = kind_at(path)
    if found == "nothing":
        return None
    if found != "file":
        raise ArtefactError(f"'{path}' is a {found}, not a calibration checkpoint; pass the path of a file.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file can raise anything: pickle's, zip's, struct's and torch's own errors
        raise ArtefactError(f"'{path}' is no calibration checkpoint ({type(error).__name__}); delete it.") from error
    found_format = content.get("format") if isinstance(content, dict) else None
    if not isinstance(found_format, int) or not isinstance(content.get("fingerprint"), list):
        raise ArtefactError(f"'{path}' is no calibration checkpoint of format {FORMAT}; delete it.")
    if found_format != FORMAT:
        raise ArtefactError(
            f"'{path}' is a calibration checkpoint of format {found_format}, this release reads format {FORMAT}; "
            "delete it or pass resume=False."
        )
    if content["fingerprint"] != fingerprint:
        raise CalibrationError(
            f"The checkpoint '{path}' was written for another model ({_difference(content, fingerprint)}); "
            "delete it or pass resume=False."
        )
    return dict(content)


def _difference(content: dict[str, Any], fingerprint: list[str]) -> str:
    for theirs, ours in zip(content["fingerprint"], fingerprint, strict=False):
        if theirs != ours:
            return f"'{theirs}' there, '{ours}' here"
    return f"{len(content['fingerprint'])} observers there, {len(fingerprint)} here"
