"""Stored results of benchmarks, and the pages whose tables are made of them."""

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import stored

ROOT = Path(__file__).parent.parent
BENCHMARKS = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
OURS = ("quantplug", "the same")


def written(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "pages.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_page_says_what_the_results_say():
    done = written("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_number_that_was_changed_by_hand_is_seen_and_written_again(tmp_path):
    page = tmp_path / "x86.md"
    shutil.copy(ROOT / "docs" / "benchmarks" / "x86.md", page)
    whole = page.read_text()
    page.write_text(whole.replace("| quantplug package | 9.2,", "| quantplug package | 9.9,"))
    assert page.read_text() != whole
    assert written("--check", page).returncode != 0
    assert written(page).returncode == 0
    assert page.read_text() == whole


@pytest.mark.parametrize("page", BENCHMARKS, ids=lambda page: page.stem)
def test_no_table_of_a_benchmark_is_written_by_hand(page):
    by_hand = re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->", "", page.read_text(), flags=re.DOTALL)
    assert not re.findall(r"^\|.*\|$", by_hand, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(stored.RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_a_file_of_results_says_how_it_was_measured_and_stands_on_a_page(path):
    runs = json.loads(path.read_text())["runs"]
    for run in runs:
        scripts = re.findall(r"benchmarks/(\w+\.py)", run["command"])
        assert [(ROOT / "benchmarks" / script).is_file() for script in scripts] == [True]
        assert run["records"]
    name = path.relative_to(stored.RESULTS).with_suffix("").as_posix()
    assert any(f'"{name}"' in page.read_text() for page in (ROOT / "docs").rglob("*.md"))


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_a_run_takes_the_place_of_what_it_has_measured_again(results, monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "speed.py"), "--data", str(tmp_path / "data")])
    stored.store("x/speed", [{"model": "a", "ms": 1.0}, {"model": "b", "ms": 2.0}], ("model",))
    stored.store("x/speed", [{"model": "b", "ms": 3.0}, {"model": "c", "ms": None}], ("model",))
    assert [tuple(each.values()) for each in stored.records("x/speed")] == [("a", 1.0), ("b", 3.0), ("c", None)]
    assert stored.records("x/speed", model=["a", "c"], ms=1.0) == [{"model": "a", "ms": 1.0}]
    first, second = json.loads((results / "x" / "speed.json").read_text())["runs"]
    assert first["command"] == "python benchmarks/speed.py --data DATA", "no folder of whoever ran it"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", second["date"])
    assert second["machine"]
    assert second["versions"]["torch"].startswith("2.13")
    stored.store("x/speed", [{"model": "a", "ms": 4.0}], ("model",))
    assert [len(run["records"]) for run in json.loads((results / "x" / "speed.json").read_text())["runs"]] == [2, 1]


def test_nothing_is_stored_without_a_name_or_with_a_key_that_is_missing(results):
    stored.store(None, [{"model": "a"}], ("model",))
    with pytest.raises(SystemExit, match=r"'speed' lack batch; each record needs all of \('model', 'batch'\)"):
        stored.store("speed", [{"model": "a"}], ("model", "batch"))
    assert not results.exists()


def test_layouts(results):
    rows = [{"engine": "fp32", "model": "m", "ms": 2.0}, {"engine": "int8", "model": "m", "ms": 1.0}]
    rows += [{"engine": "int8", "model": "n", "ms": 12.0}, {"engine": "none", "model": "n"}]
    stored.store("t", rows, ("engine", "model"))
    grid = pages.grid("t", "engine", "model", pages.numbers("ms"), best=True).split("\n")
    assert grid[1:-2] == ["| engine | m | n |", "|---|---|---|", "| fp32 | **2.0** | |", "| int8 | 1.0 | **12.0** |"]
    listing = pages.listing("t", ["model", "ms"], {"n": 1}, engine="int8").split("\n")
    assert listing[3:5] == ["| m | 1.0 |", "| n (1) | 12.0 |"]


def best(machine, batch, ours, **named):
    """Returns how many times as fast as eager float the best of our engines or of others is, by model."""
    found: dict[str, float] = {}
    for record in stored.records(f"x86/{machine}", batch=batch):
        is_ours = record["engine"].startswith(OURS)
        if "ratio" in record and is_ours == ours and named.get("of", "") in record["engine"]:
            found[record["model"]] = max(found.get(record["model"], 0), record["ratio"])
    return found


@pytest.mark.parametrize(
    ("machine", "peer", "said"),
    [("xeon-amx", "torchao", 1.43), ("zen4", "OpenVINO, NNCF", 1.06), ("xeon-amx", "ONNX Runtime", 1.55)],
)
def test_what_the_pages_say_of_the_mean_is_the_mean_of_their_table(machine, peer, said):
    mine, theirs = best(machine, 1, ours=True), best(machine, 1, ours=False, of=peer)
    assert len(mine) == len(theirs) == 7
    mean = statistics.geometric_mean(mine[model] / theirs[model] for model in mine)
    assert mean == pytest.approx(said, abs=0.015)  # the table's ratios are rounded
    for page in ("README.md", "docs/benchmarks/x86.md"):
        assert f"{said}" in (ROOT / page).read_text()
