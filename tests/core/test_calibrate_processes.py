"""Calibration on several processes, and through kill -9: real processes, real signals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from calibration_models import batches, prepared, qparams
from ranks import run_ranks

from quantplug.core.calibration.calibrate import calibrate

WORKER = Path(__file__).parents[1] / "calibration_worker.py"


def ranks(count, scenario, folder):
    """Runs one worker for each rank and returns what each wrote; None for one that died."""
    run_ranks(count, WORKER, "rank", scenario, folder, timeout=150)
    files = [folder / f"rank{rank}.json" for rank in range(count)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "scenario"), [(2, "mse"), (4, "minmax")])
def test_ranks_end_with_the_qparams_of_one_process_with_all_data(count, scenario, tmp_path):
    found = ranks(count, scenario, tmp_path)
    alone = prepared(scenario)
    calibrate(alone, batches(9))
    expected = json.loads(json.dumps(qparams(alone)))
    for rank in found:
        assert (rank["batches"], rank["processes"]) == (9, count)
        assert rank["qparams"] == expected
    assert not list(tmp_path.glob("run*"))


@pytest.mark.slow
def test_a_killed_rank_is_an_error_on_the_others_and_checkpoints_survive(tmp_path):
    first, second = ranks(2, "killed", tmp_path)
    assert second is None
    assert "CalibrationError: Rank 0 of 2 lost another process" in first["error"]
    assert first["clean"]
    assert first["seconds"] < 25
    assert sorted(p.name for p in tmp_path.glob("run*")) == ["run.rank0", "run.rank1"]
    found = ranks(2, "mse", tmp_path)
    alone = prepared("mse")
    calibrate(alone, batches(9))
    assert all(rank["qparams"] == json.loads(json.dumps(qparams(alone))) for rank in found)


@pytest.mark.slow
def test_a_failing_rank_tells_the_others_why(tmp_path):
    first, second = ranks(2, "spoiled", tmp_path)
    assert "rank 1: Batch 1: Input 'x' of batch 1 holds NaN" in first["error"]
    assert second["error"].startswith("NonFiniteError: Batch 1")
    assert first["clean"]
    assert second["clean"]


@pytest.mark.slow
def test_a_killed_rank_is_an_error_on_all_of_three_others(tmp_path):
    first, killed, *others = ranks(4, "killed", tmp_path)
    assert killed is None
    for rank in (first, *others):
        assert "of 4 lost another process" in rank["error"]
        assert rank["clean"]
        assert rank["seconds"] < 40


@pytest.mark.slow
def test_a_rank_that_does_not_answer_in_time_is_an_error(tmp_path):
    first, _ = ranks(2, "slow", tmp_path)
    assert "waited longer than 2 s" in first["error"]
    assert first["seconds"] < 8


def killed_trials(count, seed, folder):
    command = [sys.executable, str(WORKER), "kills", str(count), str(seed), str(folder)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_kill_and_resume_gives_the_same_bits(tmp_path):
    found = killed_trials(8, 0, tmp_path)
    assert found["trials"] == 8
    assert found["resumed"] > 0


@pytest.mark.slow
def test_200_kills_and_resumes_give_the_same_bits(tmp_path):
    found = killed_trials(200, 1, tmp_path)
    assert found["trials"] == 200
    assert found["resumed"] > 50
