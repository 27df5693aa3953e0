"""Texts of sizes and guards in a model's description, which torch evaluates when it reads it.

Before: a text of unknown origin. After: whether it is arithmetic over sizes that ends soon and calls nothing else.
"""

import ast
import math
import re
from typing import TypeGuard

# Letters, digits and the signs of names, paths, types and sizes.
PLAIN = re.compile(r"[\w .:/@<>|#+*,=$\[\]-]*")
# What torch computes sizes with, beside Python's own operators.
SIZES_OF_TORCH = frozenset(
    ["sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sqrt", "sym_sum", "_sym_sqrt"]
)
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
        *("trunc", "floor", "ceil", "sqrt", *SIZES_OF_TORCH),  # of `math` and `torch`
    ]
)
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


def is_size(text: str) -> bool:
    """Tells whether a text computes a size."""
    return _is_arithmetic(text, _ARITHMETIC, _SIZE_FUNCTIONS)


def is_guard(text: str) -> bool:
    """Tells whether a text says what sizes and types a model takes."""
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
        return not isinstance(node.value, str) or PLAIN.fullmatch(node.value) is not None
    return not isinstance(node, ast.Name) or "__" not in node.id
