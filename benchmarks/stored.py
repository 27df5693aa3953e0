"""Results of benchmarks as files, which the tables of the documents are made of.

A file is JSON: `runs`, each with its `command`, `machine`, `date`, `versions` and its `records`. A record maps names to
numbers and texts. A run takes the place of what it has measured again: of records with the same values of `keys`.
"""

import argparse
import datetime
import json
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]
MEASURED = ("torch", "torchao", "executorch", "openvino", "nncf", "onnxruntime", "transformers", "quantplug")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--store` to a benchmark's options."""
    parser.add_argument("--store", metavar="NAME", help=f"keep what is measured in {RESULTS.name}/NAME.json (pages.py)")


def store(name: str | None, records: Iterable[Record], keys: Sequence[str]) -> None:
    """Adds a run to a file of results; nothing where no name is given.

    Args:
        name: of the file, below the folder of results and without its ending.
        records: what was measured.
        keys: the fields that say what a record is of.

    Raises:
        SystemExit: a record lacks one of the keys.
    """
    new = list(records)
    if name is None or not new:
        return
    if missing := {key for key in keys for record in new if key not in record}:
        raise SystemExit(f"Results for {name!r} lack {', '.join(sorted(missing))}; each record needs all of {keys}.")
    path = RESULTS / f"{name}.json"
    replaced = {tuple(record[key] for key in keys) for record in new}
    runs = json.loads(path.read_text("utf-8"))["runs"] if path.is_file() else []
    for run in runs:
        run["records"] = [each for each in run["records"] if tuple(each.get(key) for key in keys) not in replaced]
    runs = [run for run in runs if run["records"]] + [{**conditions(), "records": new}]
    write(path, runs)


def write(path: Path, runs: list[Record]) -> None:
    """Writes a file of results, a line for each record."""
    lines = []
    for run in runs:
        about = json.dumps({key: value for key, value in run.items() if key != "records"}, ensure_ascii=False)
        records = ",\n".join(f"  {json.dumps(record, ensure_ascii=False)}" for record in run["records"])
        lines.append(f'{about[:-1]}, "records": [\n{records}\n]}}')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"runs": [\n' + ",\n".join(lines) + "\n]}\n", "utf-8")


def conditions() -> Record:
    """Returns how this process measures: its command, the processor, the day, and the versions that are installed."""
    installed = {package.name.lower(): package.version for package in metadata.distributions()}
    versions = {package: installed[package] for package in MEASURED if package in installed}
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_public, sys.argv[1:])])
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"command": command, "machine": processor(), "date": today, "versions": versions}


def _public(argument: str) -> str:
    """Returns an argument without the folders of whoever ran it."""
    return Path(argument).name.upper() if "/" in argument and Path(argument).exists() else argument


def processor() -> str:
    """Returns the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()


def rows_of(table: Table, **fixed: Any) -> list[Record]:
    """Returns the rows of a printed table as records by its headings, beside what holds for all of them."""
    headings = [str(column.header) for column in table.columns]
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return [{**fixed, **dict(zip(headings, row, strict=True))} for row in zip(*columns, strict=True)]


def records(name: str, **of: Any) -> list[Record]:
    """Returns the records of a file of results, in their order, of which fields have the values that are given.

    Args:
        name: of the file, below the folder of results and without its ending.
        of: the value of a field, or a list of values.
    """
    runs = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["runs"]
    every = [record for run in runs for record in run["records"]]
    wanted = {key: value if isinstance(value, list) else [value] for key, value in of.items()}
    return [record for record in every if all(record.get(key) in values for key, values in wanted.items())]
