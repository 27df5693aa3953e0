"""Exported programs in `.pt2` files, read without running what a file says.

Before: a file of unknown origin. After: an exported program, or one sentence. `torch.export.load` unpickles inputs,
weights and constants, evaluates the text of sizes and guards, and imports modules that names of types ask for. So the
records are read here, each is checked against what a model needs, and torch is given a fresh archive that holds
nothing else.
"""

import io
import json
import logging
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchao.quantization.pt2e.quantizer  # noqa: F401 (registers the operators of q/dq graphs)
from torch.export.pt2_archive import PT2ArchiveWriter

from quantplug.core.errors import ArtefactError, shown
from quantplug.core.files.model_texts import MODEL, RefusedError, check_texts
from quantplug.core.files.whole import kind_at
from quantplug.core.peers.torch_names import EXPORT_LOGGERS

_REMEDY = "read it with trust (`--trust`, `trust=True`) if you know who wrote it"
_WRITE_ONE = "write one of the model itself with torch.export.save(torch.export.export(model, inputs), path)"
# Records that tell what else a zip file is.
_OTHER_ZIPS = {
    "constants.pkl": "a TorchScript program",
    "data.pkl": "a file of torch.save, of weights or of a pickled module",
    "settings.json": "a program of backend 'openvino'",
}
_INPUTS = "data/sample_inputs/model.pt"
_PAYLOADS = {
    "data/weights/": ("data/weights/model_weights_config.json", r"weight_\d+"),
    "data/constants/": ("data/constants/model_constants_config.json", r"tensor_\d+"),
}
_EXTRA = "extra/"
_LOGGERS = (*EXPORT_LOGGERS, "torch.fx.experimental.symbolic_shapes")


def read_exported(
    path: Path, *, trust: bool = False, extra_files: dict[str, Any] | None = None
) -> torch.export.ExportedProgram:
    """Returns the exported program in a `.pt2` file.

    Args:
        path: the file.
        trust: read it with `torch.export.load`, which runs what pickles in the file say.
        extra_files: filled with the text of the extra records that it names.

    Raises:
        ArtefactError: the file is missing, holds no exported program, or asks for more than a model needs.
    """
    if kind_at(path) != "file":
        raise ArtefactError(f"There is no model file '{shown(path)}'; check the path.")
    if kind := _other_kind(path):
        raise ArtefactError(f"'{shown(path)}' is {kind}, not an exported program; {_WRITE_ONE}.")
    try:
        with silenced(_LOGGERS):
            source = path if trust else _clean_archive(path, extra_files)
            return torch.export.load(source, extra_files=extra_files if trust else None)
    except RefusedError as error:
        raise ArtefactError(f"'{shown(path)}' is not read: {error}; {_REMEDY}.") from None
    except Exception as error:
        raise ArtefactError(
            f"'{shown(path)}' holds no exported program ({type(error).__name__}); {_WRITE_ONE}."
        ) from error


def _other_kind(path: Path) -> str | None:
    """Returns what a file is that surely is no exported program, by its names and first bytes alone."""
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                first = file.read(8)
            kinds = {first[4:6] == b"ET": "an ExecuTorch program", first[:1] == b"\x80": "a pickle"}
            return kinds.get(True, "a file of another kind")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return None
    if names and all(name.endswith(".npy") for name in names):
        return "a file of numpy arrays"
    if any("/data/aotinductor/" in name for name in names):
        return "a compiled package, which `X86Package.load` reads"
    at_top = {name.rpartition("/")[2] for name in names if name.count("/") < 2}
    return next((kind for record, kind in _OTHER_ZIPS.items() if record in at_top), None)


@contextmanager
def silenced(names: Iterable[str]) -> Iterator[None]:
    """Keeps torch from logging what is told in a sentence, or what is not so."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _clean_archive(path: Path, extra_files: dict[str, Any] | None) -> io.BytesIO:
    records = _records(path)
    kept = {_INPUTS: _checked_inputs(records), MODEL: _checked_model(records)}
    for folder, (config, names) in _PAYLOADS.items():
        kept |= _checked_payload(records, folder, config, names)
    for name in extra_files or ():
        if _EXTRA + name in records:
            assert extra_files is not None
            extra_files[name] = records[_EXTRA + name].decode()
    buffer = io.BytesIO()
    with PT2ArchiveWriter(buffer) as writer:
        for name, content in kept.items():
            writer.write_bytes(name, content)
    buffer.seek(0)
    return buffer


def _records(path: Path) -> dict[str, bytes]:
    """Reads every record once; names lose the folder that all of them share."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise RefusedError("it holds compressed records, which torch.export.save does not write")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise RefusedError("its records claim to be larger than the file")
        counts = Counter(entry.filename for entry in entries)
        names = list(counts)
        odd = next((name for name, count in counts.items() if _is_odd(name) or count > 1), None)
        if odd is not None:
            raise RefusedError(f"record '{shown(odd)}' is there twice or leads out of the archive")
        found = {name.partition("/")[2]: archive.read(name) for name in names}
    if MODEL not in found and "serialized_exported_program.json" in names:
        raise RefusedError("it is of torch 2.7's format, all of whose records are pickles")
    if len(found) != len(names):
        raise RefusedError("two records have one name")
    return found


def _is_odd(name: str) -> bool:
    return name.startswith("/") or "\\" in name or ".." in name.split("/")


def _record(records: Mapping[str, bytes], name: str) -> bytes:
    if name not in records:
        raise RefusedError(f"there is no record '{shown(name)}'")
    return records[name]


def _checked_inputs(records: Mapping[str, bytes]) -> bytes:
    content = _record(records, _INPUTS)
    if content:
        try:
            torch.load(io.BytesIO(content), weights_only=True)
        except Exception as error:
            raise RefusedError(f"record '{_INPUTS}' is a pickle of more than tensors and numbers") from error
    return content


def _checked_payload(records: Mapping[str, bytes], folder: str, config: str, names: str) -> dict[str, bytes]:
    """Returns the records of weights or constants, which are plain bytes."""
    described = _json(records, config)
    kept = {config: json.dumps(described).encode()}
    for name, payload in described["config"].items():
        if payload["use_pickle"] is not False or not re.fullmatch(names, payload["path_name"]):
            raise RefusedError(f"record '{config}' asks to unpickle '{shown(name)}'")
        kept[folder + payload["path_name"]] = _record(records, folder + payload["path_name"])
        check_texts(payload["tensor_meta"], "")
    return kept


def _json(records: Mapping[str, bytes], name: str) -> Any:
    try:
        return json.loads(_record(records, name))
    except RecursionError:
        raise RefusedError(f"record '{name}' is nested too deeply") from None


def _checked_model(records: Mapping[str, bytes]) -> bytes:
    model = _json(records, MODEL)
    try:
        check_texts(model, "")
        return json.dumps(model).encode()
    except RecursionError:
        raise RefusedError(f"record '{MODEL}' is nested too deeply") from None
