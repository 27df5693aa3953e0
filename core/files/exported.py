"""Exported programs in `.pt2` files, read without running what a file says.

Before: a file of unknown origin. After: an exported program, or one sentence. `torch.export.load` unpickles inputs,
weights and constants, evaluates the text of sizes and guards, and imports modules that names of types ask for. So the
records are read here, each is checked against what a model needs, and torch is given a fresh archive that holds
nothing else.
"""

import ast
import io
import json
import logging
import math
import operator
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torchao.quantization.pt2e.quantizer  # noqa: F401 (registers the operators of q/dq graphs)
from torch.export.pt2_archive import PT2ArchiveWriter

from quantplug.core.errors import ArtefactError, shown
from quantplug.core.files.structures import is_plain_structure
from quantplug.core.files.whole import kind_at
from quantplug.core.peers.torch_names import EXPORT_LOGGERS, HigherOrderOperator, OpOverload

_REMEDY = "read it with trust (`--trust`, `trust=True`) if you know who wrote it"
_WRITE_ONE = "write one of the model itself with torch.export.save(torch.export.export(model, inputs), path)"
# Records that tell what else a zip file is.
_OTHER_ZIPS = {
    "constants.pkl": "a TorchScript program",
    "data.pkl": "a file of torch.save, of weights or of a pickled module",
    "settings.json": "a program of backend 'openvino'",
}
_MODEL, _INPUTS = "models/model.json", "data/sample_inputs/model.pt"
_PAYLOADS = {
    "data/weights/": ("data/weights/model_weights_config.json", r"weight_\d+"),
    "data/constants/": ("data/constants/model_constants_config.json", r"tensor_\d+"),
}
_EXTRA = "extra/"
_LOGGERS = (*EXPORT_LOGGERS, "torch.fx.experimental.symbolic_shapes")

_OPERATORS = frozenset(
    [
        "abs",
        "add",
        "and_",
        "eq",
        "floordiv",
        "ge",
        "getitem",
        "gt",
        "inv",
        "le",
        "lshift",
        "lt",
        "mod",
        "mul",
        "ne",
        "neg",
        "not_",
        "or_",
        "pos",
        "pow",
        "rshift",
        "sub",
        "truediv",
        "xor",
    ]
)
_SIZES_OF_TORCH = frozenset(
    ["sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sqrt", "sym_sum", "_sym_sqrt"]
)
_HIGHER_ORDER = frozenset(
    [
        "associative_scan",
        "cond",
        "invoke_subgraph",
        "map",
        "map_impl",
        "scan",
        "while_loop",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    ]
)
_FILE_OPERATORS = frozenset({"aten.from_file", "aten.save", "aten.load"})
_SIZE_FUNCTIONS = frozenset(
    [
        "Symbol",
        "Integer",
        "Rational",
        "Float",
        "Add",
        "Mul",
        "Pow",
        "Max",
        "Min",
        "Mod",
        "Abs",
        "And",
        "Or",
        "Not",
        "Eq",
        "Ne",
        "Lt",
        "Le",
        "Gt",
        "Ge",
        "Equality",
        "Unequality",
        "LessThan",
        "StrictLessThan",
        "GreaterThan",
        "StrictGreaterThan",
        "Piecewise",
        "ExprCondPair",
        "floor",
        "ceiling",
        "FloorDiv",
        "ModularIndexing",
        "Where",
        "PythonMod",
        "CleanDiv",
        "CeilToInt",
        "FloorToInt",
        "CeilDiv",
        "LShift",
        "RShift",
        "PowByNatural",
        "FloatPow",
        "FloatTrueDiv",
        "IntTrueDiv",
        "TruncToFloat",
        "TruncToInt",
        "RoundToInt",
        "RoundDecimal",
        "ToFloat",
        "Identity",
    ]
)
_ATTRIBUTES = frozenset(
    [
        *("size", "stride", "storage_offset", "shape", "dim", "numel", "isnan"),
        *("trunc", "floor", "ceil", "sqrt", *_SIZES_OF_TORCH),  # of `math` and `torch`
    ]
)
_KEPT_METADATA = frozenset({"nn_module_stack", "source_fn_stack", "torch_fn"})
_PLAIN = re.compile(r"[\w .:/@<>|#+*,=$\[\]-]*")
_DOTTED = re.compile(r"\w+(\.\w+)*")
_ARITHMETIC = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Name, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd, ast.Not, ast.And),
    *(ast.Or, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Call, ast.keyword, ast.Tuple),
)
_POWERS = frozenset(["Pow", "PowByNatural", "FloatPow", "LShift"])
_LARGEST_DEGREE = 2**12
_LONGEST_NUMBER = 400
_LARGE_TEXT = re.compile(r"\d[eE][+-]?\d{4}|\*")  # sympy reads numbers and sums out of texts
_OF_GUARDS = (*_ARITHMETIC, ast.Attribute, ast.Subscript, ast.Is, ast.IsNot)


class _RefusedError(Exception):
    """A record that asks for more than a model needs."""


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
        with _quiet():
            source = path if trust else _clean_archive(path, extra_files)
            return torch.export.load(source, extra_files=extra_files if trust else None)
    except _RefusedError as error:
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
    at_top = {name.rpartition("/")[2] for name in names if name.count("/") < 2}
    return next((kind for record, kind in _OTHER_ZIPS.items() if record in at_top), None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging the tracebacks of errors that are told in a sentence."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
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
    kept = {_INPUTS: _checked_inputs(records), _MODEL: _checked_model(records)}
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
            raise _RefusedError("it holds compressed records, which torch.export.save does not write")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise _RefusedError("its records claim to be larger than the file")
        counts = Counter(entry.filename for entry in entries)
        names = list(counts)
        odd = next((name for name, count in counts.items() if _is_odd(name) or count > 1), None)
        if odd is not None:
            raise _RefusedError(f"record '{shown(odd)}' is there twice or leads out of the archive")
        found = {name.partition("/")[2]: archive.read(name) for name in names}
    if _MODEL not in found and "serialized_exported_program.json" in names:
        raise _RefusedError("it is of torch 2.7's format, all of whose records are pickles")
    if len(found) != len(names):
        raise _RefusedError("two records have one name")
    return found


def _is_odd(name: str) -> bool:
    return name.startswith("/") or "\\" in name or ".." in name.split("/")


def _record(records: Mapping[str, bytes], name: str) -> bytes:
    if name not in records:
        raise _RefusedError(f"there is no record '{shown(name)}'")
    return records[name]


def _checked_inputs(records: Mapping[str, bytes]) -> bytes:
    content = _record(records, _INPUTS)
    if content:
        try:
            torch.load(io.BytesIO(content), weights_only=True)
        except Exception as error:
            raise _RefusedError(f"record '{_INPUTS}' is a pickle of more than tensors and numbers") from error
    return content


def _checked_payload(records: Mapping[str, bytes], folder: str, config: str, names: str) -> dict[str, bytes]:
    """Returns the records of weights or constants, which are plain bytes."""
    described = _json(records, config)
    kept = {config: json.dumps(described).encode()}
    for name, payload in described["config"].items():
        if payload["use_pickle"] is not False or not re.fullmatch(names, payload["path_name"]):
            raise _RefusedError(f"record '{config}' asks to unpickle '{shown(name)}'")
        kept[folder + payload["path_name"]] = _record(records, folder + payload["path_name"])
        _check(payload["tensor_meta"], "")
    return kept


def _json(records: Mapping[str, bytes], name: str) -> Any:
    try:
        return json.loads(_record(records, name))
    except RecursionError:
        raise _RefusedError(f"record '{name}' is nested too deeply") from None


def _checked_model(records: Mapping[str, bytes]) -> bytes:
    model = _json(records, _MODEL)
    try:
        _check(model, "")
        return json.dumps(model).encode()
    except RecursionError:
        raise _RefusedError(f"record '{_MODEL}' is nested too deeply") from None


def _check(value: Any, key: str) -> None:
    """Checks all text in a model's description by the key that it stands under."""
    if isinstance(value, dict):
        if key == "metadata" and all(isinstance(text, str) for text in value.values()):  # else an input of that name
            for name in [name for name, text in value.items() if not _is_kept(name, text)]:
                del value[name]
            return
        for name, inner in value.items():
            _check_text(name, "")
            _check(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, key)
    elif isinstance(value, str):
        _check_text(value, key)


def _is_kept(name: str, text: str) -> bool:
    return name in _KEPT_METADATA and text.isprintable() and (name != "torch_fn" or text.count(";") == 1)


def _check_text(text: str, key: str) -> None:
    accepts = _ACCEPTS.get(key, _is_plain)
    if not accepts(text):
        raise _RefusedError(f"record '{_MODEL}' holds {f'as {key} ' if key else ''}the text {shown(text)!r}")


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None and "__import__" not in text


def _is_message(text: str) -> bool:
    """Tells whether a text may be an operator's argument (an assertion's words) or a path; nothing evaluates these."""
    return "__" not in text and text.isprintable()


def _is_name(text: str) -> bool:
    return re.fullmatch(r"\w*", text) is not None


def _is_operator(text: str) -> bool:
    """Tells whether a target is an operator, and not any function that torch's modules lead to."""
    if not text:
        return True
    if _DOTTED.fullmatch(text) is None or "__" in text.replace("__and__", "").replace("__or__", ""):
        return False
    module, _, name = text.partition(".")
    if module == "_operator":
        return name in _OPERATORS
    if module == "math":
        return callable(getattr(math, name, None))
    if module != "torch" or not name.startswith("ops."):
        return name in _SIZES_OF_TORCH
    namespace, _, rest = name.removeprefix("ops.").partition(".")
    if f"{namespace}.{rest.partition('.')[0]}" in _FILE_OPERATORS:
        return False
    try:
        found = operator.attrgetter(name)(torch)
    except (AttributeError, RuntimeError):
        return False
    return isinstance(found, OpOverload) or (isinstance(found, HigherOrderOperator) and rest in _HIGHER_ORDER)


def _is_size(text: str) -> bool:
    return _is_arithmetic(text, _ARITHMETIC, _SIZE_FUNCTIONS)


def _is_guard(text: str) -> bool:
    return _is_arithmetic(text, _OF_GUARDS, _SIZE_FUNCTIONS | {"len", "int", "float", "isinstance", "max", "min"})


def _is_arithmetic(text: str, kinds: tuple[type[ast.AST], ...], functions: frozenset[str]) -> bool:
    try:
        tree = ast.parse(text, mode="eval")
        ends = _degree(tree) <= _LARGEST_DEGREE
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return ends and all(
        isinstance(node, kinds) and _is_harmless(node, functions) and _is_small(node) for node in ast.walk(tree)
    )


def _degree(node: ast.AST) -> float:
    """Returns the largest exponent that powers of powers come to; evaluating a large one does not end."""
    inner = max(map(_degree, ast.iter_child_nodes(node)), default=1.0)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return inner * _exponent(node.right)
    return inner * _exponent(node.args[-1]) if _is_call_of(node, *_POWERS) and node.args else inner


def _exponent(node: ast.AST) -> float:
    if isinstance(node, ast.UnaryOp):
        return _exponent(node.operand)
    if isinstance(node, ast.Constant):
        return abs(float(node.value)) if isinstance(node.value, int | float) else math.inf
    if _is_call_of(node, "Integer", "Rational", "Float") and node.args:
        return _exponent(node.args[0])
    return 1.0 if isinstance(node, ast.Name) or _is_call_of(node, "Symbol") else math.inf


def _is_call_of(node: ast.AST, *names: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _is_small(node: ast.AST) -> bool:
    """Tells whether a node takes no time or memory without end beside its powers, as long texts and numbers do."""
    if isinstance(node, ast.Constant):
        is_number = not isinstance(node.value, str) or _LARGE_TEXT.search(node.value) is None
        return is_number and len(str(node.value)) <= _LONGEST_NUMBER
    if isinstance(node, ast.BinOp):
        return not _is_sequence(node.left) and not _is_sequence(node.right)
    return not _is_call_of(node, "Float") or all(map(_is_precision, node.args[1:] + [k.value for k in node.keywords]))


def _is_precision(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value <= _LONGEST_NUMBER


def _is_sequence(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, ast.Tuple | ast.BoolOp)


def _is_harmless(node: ast.AST, functions: frozenset[str]) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) or (isinstance(node.func, ast.Name) and node.func.id in functions)
    if isinstance(node, ast.Attribute):
        return node.attr in _ATTRIBUTES
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str) or _PLAIN.fullmatch(node.value) is not None
    return not isinstance(node, ast.Name) or "__" not in node.id


def _is_tree(text: str) -> bool:
    return not text or is_plain_structure(text)


_ACCEPTS = {
    "as_string": _is_message,
    "parameter_name": _is_message,
    "buffer_name": _is_message,
    "fqn": _is_message,
    "name": _is_name,
    "forward_arg_names": _is_name,
    "target": _is_operator,
    "as_operator": _is_operator,
    "expr_str": _is_size,
    "guards_code": _is_guard,
    "in_spec": _is_tree,
    "out_spec": _is_tree,
}
