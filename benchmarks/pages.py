"""Writes the tables of the documents from the files of results.

    python benchmarks/pages.py            # after a benchmark was run with --store
    python benchmarks/pages.py --check    # 0 if every page says what the results say

A page says in a comment which table stands behind it,
`<!-- [[[cog print(grid("x86/zen5", "engine", "model", speed)) ]]] -->`.
What stands between that and `<!-- [[[end]]] -->` is written here.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cogapp import Cog
from stored import Record, records

DOCS = Path(__file__).parent.parent / "docs"
PROLOGUE = "import cog; import pages; globals().update({n: getattr(pages, n) for n in pages.LAYOUTS})"
HARD = ["int8 weights, per tensor", "4-bit weights, per channel", "4-bit weights, per tensor"]
WIDE = 0.1  # quartiles that lie further apart than this share of the median are shown


def listing(name: str, headings: Sequence[str], notes: Mapping[str, int] | None = None, **of: Any) -> str:
    """Returns a table with a row for each record.

    Args:
        name: of the file of results.
        headings: the fields that are shown, in this order.
        notes: numbers of footnotes by the text of the first cell.
        of: fields and values of the records that are shown.
    """
    marks = {row: f"{row} ({number})" for row, number in (notes or {}).items()}
    rows = [[text(record.get(heading)) for heading in headings] for record in records(name, **of)]
    return markdown(headings, [[marks.get(first, first), *others] for first, *others in rows])


def grid(
    name: str,
    rows: str | Sequence[str],
    columns: str | Sequence[str],
    cell: Callable[[list[Record]], str],
    best: bool = False,
    **of: Any,
) -> str:
    """Returns a table whose rows and columns are values of fields.

    Args:
        name: of the file of results.
        rows: the field, or the fields, with a row for each of their values, in the order in which they come.
        columns: the same for columns; values of several fields are joined by commas.
        cell: the text of the records of one row and column.
        best: the greatest number of a column is bold.
        of: fields and values of the records that are shown.
    """
    rows = [rows] if isinstance(rows, str) else rows
    columns = [columns] if isinstance(columns, str) else columns
    found: dict[tuple[str, ...], dict[str, list[Record]]] = {}
    headings: dict[str, None] = {}
    for record in records(name, **of):
        heading = ", ".join(text(record[field]) for field in columns)
        headings.setdefault(heading)
        found.setdefault(tuple(text(record[field]) for field in rows), {}).setdefault(heading, []).append(record)
    cells = {row: [cell(given[one]) if one in given else "" for one in headings] for row, given in found.items()}
    cells = {row: texts for row, texts in cells.items() if any(texts)}
    if best:
        for number in range(len(headings)):
            chosen = max((row for row in cells if cells[row][number]), key=lambda row: _number(cells[row][number]))
            cells[chosen][number] = f"**{cells[chosen][number]}**"
    return markdown([*rows, *headings], [[*row, *others] for row, others in cells.items()])


def _number(cell: str) -> float:
    found = re.search(r"-?\d+(\.\d+)?", cell)
    return float(found[0]) if found else float("-inf")


def speed(given: list[Record]) -> str:
    """Returns how many times as fast as fp32 an engine is, with quartiles that lie far apart, and its SQNR."""
    (record,) = given
    if record["engine"].startswith("fp32"):
        return f"{record['milliseconds']:.4g} ms"
    low, high, ratio = record.get("low", record["ratio"]), record.get("high", record["ratio"]), record["ratio"]
    spread = f" ({low:.1f} to {high:.1f})" if high - low > WIDE * ratio else ""
    return f"{ratio:.1f}{spread}, {record['sqnr']:.1f} dB"


def spent(given: list[Record]) -> str:
    """Returns the seconds that a model took to quantize, and its size."""
    (record,) = given
    if not record.get("seconds"):
        return ""
    return f"{record['seconds']:.1f} s" + (f", {record['megabytes']:.1f} MB" if record["megabytes"] else "")


def recipes(given: list[Record]) -> str:
    """Returns decibels and top-1 of each recipe, the last one's decibels in bold."""
    noise, right = ([f"{record[field]:.1f}" for record in given] for field in ("dB", "top-1"))
    return f"{', '.join([*noise[:-1], f'**{noise[-1]}**'])}; {', '.join(right)}"


def rounded(given: list[Record]) -> str:
    """Returns decibels of the layers where there are some, decibels of the logits, and seconds."""
    (record,) = given
    noise = ", ".join(filter(None, (record["layers, dB"], record["logits, dB"])))
    return f"{noise}; {float(record['seconds']):.1f} s" if record["layers, dB"] else noise


def weights_alone(given: list[Record]) -> str:
    """Returns how many times as fast as float a block is, its size as a share of float's, and its SQNR."""
    (record,) = given
    noise = [f"{record['dB']:.1f} dB"] if record["dB"] else []
    return ", ".join([f"{record['speed']:.2f}", f"{record['share']:.3g}", *noise])


def cost(given: list[Record]) -> str:
    """Returns what calibration costs of the float forward, and the seconds of the search for ranges."""
    (record,) = given
    search = record.get("search, s")
    return record["calibration / float"] + (f"; {search} s" if search else "")


def numbers(*fields: str) -> Callable[[list[Record]], str]:
    """Returns what shows numbers of the one record of a cell."""
    return lambda given: " ".join(f"{record[field]:.1f}" for record in given for field in fields if field in record)


def text(value: Any) -> str:
    """Returns a value as it stands in a cell."""
    return "" if value is None else str(value)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown, with an empty line around it."""
    lines = [f"| {' | '.join(row)} |".replace("  ", " ") for row in (headings, *rows)]
    return "\n".join(["", lines[0], "|" + "---|" * len(headings), *lines[1:], "", ""])


LAYOUTS = ("listing", "grid", "speed", "spent", "recipes", "rounded", "weights_alone", "cost", "numbers", "HARD")


def main() -> None:
    """Reads the command line and writes the pages, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="*", help="all by default")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a page differs")
    given = parser.parse_args()
    pages = given.pages or sorted(path for path in DOCS.rglob("*.md") if "[[[cog" in path.read_text("utf-8"))
    way = ["--check", "--diff"] if given.check else ["-r"]
    sys.exit(Cog().main(["cog", "-P", "-p", PROLOGUE, "-I", str(Path(__file__).parent), *way, *map(str, pages)]))


if __name__ == "__main__":
    main()
