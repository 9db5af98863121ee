"""`elastic audit` over real runs: kills, drains, resumes, odd lengths, loader processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_run import (
    QUIET,
    committed,
    end,
    environ,
    job,
    refused,
    run_dir_of,
    start,
    worker_pid,
)
from tests.support import eventually

pytestmark = pytest.mark.integration
JOB = str(Path(__file__).resolve().parents[1] / "programs" / "job.py")
SAMPLES = 203  # 7 steps of 8 micro-batches of 4, the last of 11 samples


def audited(place: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "elastic.cli", "audit", "--json", str(place)],
        env=environ(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] == (done.returncode == 0)
    return answer


def assert_each_sample_once(answer: dict[str, Any], epochs: int) -> None:
    assert answer["problems"] == []
    assert [each["epoch"] for each in answer["epochs"]] == list(range(epochs))
    for each in answer["epochs"]:
        assert each["whole"], each
        assert each["samples"] == SAMPLES
        assert each["proved"] == "each sample once, in the job's order"


def test_kills_with_loader_processes_and_one_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    train = {"epochs": 3, "pause_s": 0.05, "loader_workers": 2}
    options = {**QUIET, "nproc": 3, "checkpoint": "ckpt", "train": train}
    process = start(tmp_path, JOB, json.dumps(options))
    run_dir = run_dir_of(tmp_path)
    for after, slot in ((3, 1), (13, 0)):  # 14 is the last step of the second epoch
        eventually(lambda n=after: committed(run_dir) >= n, within_s=60, what=f"step {after}")
        os.kill(worker_pid(run_dir, slot), signal.SIGKILL)
    code, _, err = end(process)
    assert code == 0, err
    answer = audited(run_dir)
    assert_each_sample_once(answer, 3)
    assert (answer["first_step"], answer["last_step"]) == (1, 21)


def test_two_resumes_in_one_epoch_and_a_checkpoint_at_an_epochs_end(tmp_path: Path) -> None:
    options = {"checkpoint": "ckpt", "save_every": 7}
    for stop_at, nproc in ((9, 2), (11, 3)):
        train = {"epochs": 2, "stop_at": stop_at}
        assert job(tmp_path, nproc=nproc, train=train, **options)["step"] == stop_at + 1
        epochs = audited(tmp_path / "ckpt")["epochs"]
        assert [each["whole"] for each in epochs] == [True, False]
        assert epochs[1]["proved"] == "what was done, in the job's order"
    shutil.rmtree(tmp_path / "ckpt" / "step-000000012")  # the next resume goes back further
    job(tmp_path, nproc=2, train={"epochs": 2}, **options)
    answer = audited(tmp_path / "ckpt")
    assert_each_sample_once(answer, 2)
    assert len(answer["runs"]) == 3
    assert answer["superseded"] == 2
    assert answer["last_step"] == 14


def test_a_changed_log_is_no_proof_any_more(tmp_path: Path) -> None:
    run_dir = Path(job(tmp_path, nproc=1, train={"epochs": 1})["events"]).parent
    assert_each_sample_once(audited(run_dir), 1)
    shown = subprocess.run(
        [sys.executable, "-m", "elastic.cli", "audit", str(run_dir)],
        env=environ(), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "203 of 203" in shown
    assert shown.endswith("every sample counts once\n")
    [path] = [
        path
        for path in (run_dir / "events").glob("worker-*.jsonl")
        if "step.committed" in path.read_text()
    ]
    lines = path.read_text().splitlines(keepends=True)
    fourth = next(
        i for i, line in enumerate(lines) if '"step.committed"' in line and '"step":4' in line
    )
    path.write_text("".join(lines[:fourth] + lines[fourth + 1 :]))
    answer = audited(run_dir)
    assert "step 4 has no record, but step 7 has" in answer["problems"]
    assert answer["epochs"][0]["proved"] == "not provable"
    path.write_text("rubbish\n\x00")
    code, sentence = refused(tmp_path, "-m", "elastic.cli", "audit", str(run_dir))
    assert code == 2
    assert "cannot be audited" in sentence
    code, sentence = refused(tmp_path, "-m", "elastic.cli", "audit", "nothing-here")
    assert (code, "no run of 'nothing-here'" in sentence) == (2, True)
