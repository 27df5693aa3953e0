"""Files that appear whole or not at all."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantplug.core.blank import shrunk
from quantplug.core.errors import ArtefactError
from quantplug.core.structures import structure_text


def require_writable(path: Path) -> None:
    """Makes sure that a file can be written before the work for it begins.

    Raises:
        ArtefactError: its folder does not exist, or the path is a folder, a device or a pipe.
    """
    if path.is_dir():
        raise ArtefactError(f"'{path}' is a folder; give the path of a file to write.")
    if path.exists() and not path.is_file():
        raise ArtefactError(f"'{path}' is a device or a pipe, which a file would replace; give the path of a file.")
    if not path.absolute().parent.is_dir():
        raise ArtefactError(
            f"There is no folder '{path.absolute().parent}' to write '{path.name}' to; create it first."
        )


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
    unfinished = target.with_name(f".{target.stem}.unfinished{target.suffix}")
    try:
        write(unfinished)
        unfinished.replace(target)
        return path
    except ArtefactError as error:  # of a writer that makes its file whole too, under the name that it was given
        raise ArtefactError(str(error).replace(str(unfinished), str(path))) from error
    except OSError as error:
        raise ArtefactError(
            f"'{path}' cannot be written ({error.strerror or error}); free or change its place."
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_content(path: str | Path, content: bytes) -> Path:
    """Writes a file of known content that appears whole or not at all, and returns its path.

    Raises:
        ArtefactError: the folder does not exist, or the file cannot be written.
    """
    return write_whole(Path(path), lambda unfinished: unfinished.write_bytes(content))


def exported_content(exported: torch.export.ExportedProgram, extra_files: dict[str, Any] | None = None) -> bytes:
    """Returns a `.pt2` file without the data of example inputs; torch's own writer of files aborts on a full disk.

    Raises:
        ArtefactError: the model takes or returns containers that a file cannot name.
    """
    for structure in exported.call_spec:
        structure_text(structure)  # torch's writer would raise in its midst
    args, kwargs = exported.example_inputs or ((), {})
    exported.example_inputs = (shrunk(args), shrunk(kwargs))
    buffer = io.BytesIO()
    torch.export.save(exported, buffer, extra_files=extra_files)
    return buffer.getvalue()
