"""The demo at its smallest, as a person runs it: promises are kept, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

import ckpt
from elastic.events import read_events
from elastic.job_root import run_dirs
from scripts.compare_checkpoints import compare
from tests.ckpt_support import write_checkpoint
from tests.support import alive, eventually

ROOT = ckpt.__path__[0].rpartition("/")[0]
DEMO = [sys.executable, f"{ROOT}/scripts/demo.py", "--tiny", "--out"]
PINNED = {
    "committed_steps",
    "steps_lost",
    "recoveries",
    "bit_equal_to_undisturbed",
    "restored_world_size",
    "tokens_per_s",
    "loss_first",
    "loss_last",
    "restored_bytes_from_s3",
    "commit",
    "torch",
}
PINNED_OF_RECOVERY = {"cause", "detect_ms", "reshape_ms", "redone_step_ms", "total_ms"}

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


def rewritten(root, source, *, state=None, extra=None):
    """Write the newest checkpoint of `source` anew, with good checksums, and return its root."""
    with ckpt.open_checkpoint(str(source)) as found:
        whole = {name: (info, found.read(name).tobytes()) for name, info in found.tensors.items()}
        write_checkpoint(
            root,
            {**whole, **(state or {})},
            3,
            found.step,
            found.generation,
            extra=found.extra | (extra or {}),
            lineage=[list(pair) for pair in found.manifest.lineage],
        )
    return str(root)


def test_the_demo_keeps_its_promises(tmp_path):
    out = tmp_path / "demo"
    done = subprocess.run([*DEMO, out], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout
    for told in ("SIGKILL to worker 1", "recovered", "back at 4 workers", "equal, bit for bit"):
        assert told in done.stdout

    report = json.loads((out / "report.json").read_text())
    assert report.keys() >= PINNED
    assert report["broken_promises"] == []
    assert (report["committed_steps"], report["steps_lost"]) == (50, 0)
    assert report["restored_world_size"] == 2
    assert report["bit_equal_to_undisturbed"] is True
    (recovery,) = report["recoveries"]
    assert recovery.keys() >= PINNED_OF_RECOVERY
    parts = recovery["detect_ms"] + recovery["reshape_ms"] + recovery["redone_step_ms"]
    assert parts == pytest.approx(recovery["total_ms"], abs=0.5)
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert not (out / "s3").exists()

    # What was compared can differ: the same checkpoint with one bit altered, or one place on in
    # the data, is as valid and is told apart.
    end, undisturbed = out / "ckpt", str(out / "undisturbed")
    assert compare(str(end), undisturbed).equal
    assert compare(rewritten(tmp_path / "same", end), undisturbed).equal
    with ckpt.open_checkpoint(str(end)) as found:
        name = next(iter(found.tensors))
        data = bytearray(found.read(name).tobytes())
        data[len(data) // 2] ^= 0x10
        bit = {name: (found.tensors[name], bytes(data))}
        place = {
            "position": found.extra["position"] | {"index": found.extra["position"]["index"] + 1}
        }
    altered = compare(rewritten(tmp_path / "bit", end, state=bit), undisturbed)
    assert not altered.equal
    assert altered.cursor
    moved = compare(rewritten(tmp_path / "place", end, extra=place), undisturbed)
    assert not moved.equal
    assert moved.parameters
    assert not moved.cursor


@pytest.fixture
def begun(tmp_path):
    """A demo whose first part trains, with the pids of all that its events name."""
    out = tmp_path / "demo"
    demo = subprocess.Popen([*DEMO, out], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log_dir = out / "runs" / "with-a-kill"

    def pids():
        records = [r for run in run_dirs(log_dir) for r in read_events(run)]
        assert any(r["event"] == "step.committed" for r in records)
        return [r["pid"] for r in records if r["event"] in ("worker.started", "agent.started")]

    found = eventually(pids, within_s=90, what="the first committed step")
    assert len(found) == 5
    yield demo, found
    demo.kill()
    demo.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_the_demo_outlives_it(begun, number):
    demo, pids = begun
    os.kill(demo.pid, number)
    _, errors = demo.communicate(timeout=60)
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    assert demo.returncode == expected[number]
    assert "Traceback" not in errors
    eventually(lambda: not any(map(alive, pids)), within_s=40, what="the end of all processes")
