"""Files that appear whole or not at all."""

import hashlib
import io
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from quantplug.core.errors import ArtefactError, shown
from quantplug.core.files.blank import forget_source, shrunk
from quantplug.core.files.structures import structure_text


def kind_at(path: Path) -> Literal["nothing", "file", "folder", "device"]:
    """Returns what is at a path; a pipe counts as a device.

    Raises:
        ArtefactError: the system takes no such path: a name is too long, a folder may not be entered.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    except (OSError, ValueError) as error:
        raise ArtefactError(f"'{shown(path)}' is no path that can be used ({_why(error)}); give another.") from error
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "device"


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def require_writable(path: Path) -> None:
    """Makes sure that a file can be written before the work for it begins.

    Raises:
        ArtefactError: its folder does not exist or cannot be written to, or the path is a folder, a device or a pipe.
    """
    found, folder = kind_at(path), path.absolute().parent
    if found == "folder":
        raise ArtefactError(f"'{path}' is a folder; give the path of a file to write.")
    if found == "device":
        raise ArtefactError(f"'{path}' is a device or a pipe, which a file would replace; give the path of a file.")
    if kind_at(folder) != "folder":
        raise ArtefactError(f"There is no folder '{folder}' to write '{path.name}' to; create it first.")
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise ArtefactError(f"'{path}' cannot be written ({_why(error)}); free or change its place.") from error


def beside(path: Path) -> Path:
    """Returns the file that is written first, of which nothing is left that the next write does not replace.

    Its name is short, since names that the system takes may have no room for more.
    """
    suffix = path.suffix if len(path.suffix) < 16 else ""
    return path.with_name(f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}.unfinished{suffix}")


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Writes a file that appears whole or not at all, whatever interrupts it, and returns its path.

    Args:
        path: the file; one that is there already is replaced at the end.
        write: writes the content to the path that it is given, beside the final one.

    Raises:
        ArtefactError: the folder does not exist, or the file cannot be written.
    """
    require_writable(path)
    # What a link points to is replaced, not the link.
    target = path.resolve()
    unfinished = beside(target)
    try:
        write(unfinished)
        unfinished.replace(target)
        return path
    except ArtefactError as error:  # of a writer that makes its file whole too, under the name that it was given
        raise ArtefactError(str(error).replace(str(unfinished), str(path))) from error
    except OSError as error:
        raise ArtefactError(f"'{path}' cannot be written ({_why(error)}); free or change its place.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_content(path: str | Path, content: bytes) -> Path:
    """Writes a file of known content that appears whole or not at all, and returns its path.

    Raises:
        ArtefactError: the folder does not exist, or the file cannot be written.
    """
    return write_whole(Path(path), lambda unfinished: unfinished.write_bytes(content))


def exported_content(exported: torch.export.ExportedProgram, extra_files: dict[str, Any] | None = None) -> bytes:
    """Returns a `.pt2` file without the data of example inputs and without lines of the model's source code.

    Torch's own writer of files aborts on a full disk.

    Raises:
        ArtefactError: the model takes or returns containers that a file cannot name.
    """
    for structure in exported.call_spec:
        structure_text(structure)  # torch's writer would raise in its midst
    args, kwargs = exported.example_inputs or ((), {})
    exported.example_inputs = (shrunk(args), shrunk(kwargs))
    forget_source(exported.graph_module)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer, extra_files=extra_files)
    return buffer.getvalue()
