"""Files of earlier releases are read, or refused in one sentence; `tests/golden/VERSION` has one of each format."""

import json
import shutil
import zipfile
from pathlib import Path

import file_formats
import pytest
import torch
from file_formats import X, model

import quantplug
from quantplug import ONNXProgram, OpenVINOProgram, Plan, X86Program, tuning
from quantplug.algorithms.sensitivity import Sensitivity
from quantplug.core.errors import ArtefactError, CalibrationError

GOLDEN = Path(__file__).parent / "golden"
RELEASES = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
RELEASE = pytest.mark.parametrize("kept", RELEASES, ids=lambda path: path.name)
LOADERS = {
    "x86.pt2": X86Program.load,
    "openvino.zip": OpenVINOProgram.load,
    "onnxruntime.onnx": ONNXProgram.load,
}
PROGRAM = pytest.mark.parametrize(
    "name", ["x86.pt2", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LOADERS)[1:])]
)


def shape(value):
    """Returns what stays of a JSON value without its numbers: names, and what lies in lists."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


@RELEASE
def test_a_plan_is_read_and_replayed(kept):
    plan = Plan.from_json((kept / "plan.json").read_text())
    again = quantplug.prepare_pt2e(torch.export.export(model(), (X,)).module(), plan.quantizer())
    assert quantplug.plan_of(again).differences(plan) == []
    assert quantplug.plan_of(file_formats.prepared()).differences(plan) == []


@RELEASE
def test_a_killed_calibration_goes_on(kept, tmp_path):
    shutil.copy(kept / "calibration.pt", tmp_path)
    batches = [X, 2 * X, 3 * X]
    resumed, whole = (file_formats.prepared(observer="minmax") for _ in range(2))
    result = quantplug.calibrate(resumed, batches, checkpoint=tmp_path / "calibration.pt", progress=False)
    quantplug.calibrate(whole, batches, progress=False)
    assert (result.resumed_at, result.batches) == (2, 3)
    found, expected = (quantplug.convert_pt2e(each)(5 * X) for each in (resumed, whole))
    assert torch.equal(found, expected)


@RELEASE
@PROGRAM
def test_a_program_is_loaded_and_runs(kept, name):
    program = LOADERS[name](kept / name)
    for batch in (X, X):
        assert quantplug.sqnr(program(batch), model()(batch)) > 30


@RELEASE
def test_a_sensitivity_is_read(kept):
    found = Sensitivity.from_json((kept / "sensitivity.json").read_text())
    assert {row.operator for row in found.rows} == {"linear"}
    assert found.decibels > 30


@RELEASE
@pytest.mark.slow
def test_a_search_goes_on_without_another_trial(kept, tmp_path, monkeypatch):
    shutil.copy(kept / "tune.jsonl", tmp_path)
    monkeypatch.setattr(tuning, "run_trial", lambda *arguments: pytest.fail("a trial was made again"))
    found = file_formats.searched(tmp_path / "tune.jsonl")
    assert [trial.scopes for trial in found.trials] == [(("*", "int8"),)]


def test_names_of_the_newest_release_are_those_of_today():
    """Who changes a format gives it another version, and keeps another folder of files."""
    calibrated = file_formats.prepared()
    quantplug.calibrate(calibrated, [X, 2 * X], progress=False)
    written = {
        "plan.json": quantplug.plan_of(calibrated).json(),
        "sensitivity.json": quantplug.sensitivity(calibrated, [X]).to_json(),
        "report.json": quantplug.explain(quantplug.convert_pt2e(calibrated)).json(),
    }
    for name, text in written.items():
        assert shape(json.loads(text)) == shape(json.loads((RELEASES[-1] / name).read_text())), name


@RELEASE
def test_no_name_of_a_report_went_away(kept):
    """Nothing reads reports back; whoever stores them finds the names again."""
    calibrated = file_formats.prepared()
    quantplug.calibrate(calibrated, [X, 2 * X], progress=False)
    today = json.loads(quantplug.explain(quantplug.convert_pt2e(calibrated)).json())
    before = json.loads((kept / "report.json").read_text())
    assert set(before) <= set(today)
    assert set(before["rows"][0]) <= set(today["rows"][0])


@pytest.mark.parametrize("version", [2, 4, "3"])
def test_a_plan_of_another_version_is_one_sentence(version):
    other = {**json.loads((RELEASES[-1] / "plan.json").read_text()), "version": version}
    with pytest.raises(
        ArtefactError, match=rf"^The plan has version {version}, this release reads 3; make it again\.$"
    ):
        Plan.from_json(json.dumps(other))


@pytest.mark.parametrize("version", [3, 5])
def test_a_checkpoint_of_another_format_is_one_sentence(version, tmp_path):
    path = tmp_path / "calibration.pt"
    torch.save({**torch.load(RELEASES[-1] / "calibration.pt"), "format": version}, path)
    with pytest.raises((ArtefactError, CalibrationError), match=rf"of format {version}, this release reads format 4; "):
        quantplug.calibrate(file_formats.prepared(observer="minmax"), [X], checkpoint=path, progress=False)


@pytest.mark.slow
def test_a_log_of_another_version_is_one_sentence(tmp_path):
    heading, *trials = (RELEASES[-1] / "tune.jsonl").read_text().splitlines()
    log = tmp_path / "tune.jsonl"
    log.write_text("\n".join([json.dumps({**json.loads(heading), "tune": 1}), *trials]))
    with pytest.raises(ArtefactError, match=r"has version 1, this release reads 2; give another path\.$"):
        file_formats.searched(log)


def _without_a_setting(before, path):
    """Writes an archive again with a setting of another name in its JSON, as another release might have it."""
    with zipfile.ZipFile(before) as old, zipfile.ZipFile(path, "w") as new:
        for record in old.namelist():
            content = old.read(record)
            if record.endswith(".json") and b'"pair"' in content:
                content = content.replace(b'"pair"', b'"pears"')
            new.writestr(record, content)


@pytest.mark.parametrize("name", ["x86.pt2", pytest.param("openvino.zip", marks=pytest.mark.slow)])
def test_a_program_with_other_settings_is_one_sentence(name, tmp_path):
    _without_a_setting(RELEASES[-1] / name, tmp_path / name)
    with pytest.raises(ArtefactError, match=r"^'.*' is no program of the \w+ lowering.*pair.*; pass a file that .*\.$"):
        LOADERS[name](tmp_path / name)
