"""`elastic.run()` as a person uses it: scripts as processes, from first line to exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.events import read_events
from elastic.membership.etcd_server import EtcdServer
from tests.support import alive, eventually

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "programs" / "job.py"
TIMEOUT_S = 90
QUIET = {"console": "off", "nproc": 2, "virtual_ranks": 8, "segments": 8}


def environ(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
    return {**clean, "PYTHONPATH": str(ROOT), **more}


def start(cwd: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environ(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"no end within {TIMEOUT_S} s\n{out}\n{err}") from None
    return process.returncode, out, err


def job(cwd: Path, **options: Any) -> dict[str, Any]:
    """Run the job script to a good end and return what it printed last."""
    code, out, err = end(start(cwd, str(JOB), json.dumps({**QUIET, **options})))
    assert code == 0, f"{out}\n{err}"
    return json.loads(out.strip().splitlines()[-1])


def refused(cwd: Path, *arguments: str, **more: str) -> tuple[int, str]:
    """Run something that must fail; returns its code and its one sentence."""
    code, out, err = end(start(cwd, *arguments, **more))
    assert "Traceback" not in out + err, err
    lines = [line for line in err.strip().splitlines() if line.startswith("everstep: ")]
    assert lines, f"no sentence: {out}\n{err}"
    return code, lines[-1].removeprefix("everstep: ")


def run_dir_of(cwd: Path, place: str = "ckpt") -> Path:
    """Return the run directory of a run that has just been started there."""

    def look() -> Path | None:
        found = sorted((cwd / place).glob("runs/*/agent.json"))
        return found[-1].parent if found else None

    return eventually(look, within_s=60, what="the agent wrote where it is")


def worker_pid(run_dir: Path, slot: int) -> int:
    def look() -> int | None:
        started = [
            e for e in read_events(run_dir) if e["event"] == "worker.started" and e["slot"] == slot
        ]
        return started[-1]["pid"] if started else None

    return eventually(look, within_s=60, what=f"worker {slot} was started")


def committed(run_dir: Path) -> int:
    return max(
        (e["step"] for e in read_events(run_dir) if e["event"] == "step.committed"), default=0
    )


def whole(**train: Any) -> dict[str, Any]:
    """Return the value of the undisturbed run, made once for all tests of this file."""
    key = json.dumps(train, sort_keys=True)
    if key not in _WHOLE:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as directory:
            _WHOLE[key] = job(Path(directory), nproc=1, train=train)["value"]
    return _WHOLE[key]


def resumed(value: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a train function keeps in its own variables, which begin anew."""
    return {key: item for key, item in value.items() if key not in ("curve", "saved")}


_WHOLE: dict[str, dict[str, Any]] = {}


def test_a_worker_is_killed_and_the_result_is_the_undisturbed_one(tmp_path: Path) -> None:
    train = {"epochs": 6, "pause_s": 0.03}
    process = start(
        tmp_path,
        str(JOB),
        json.dumps({**QUIET, "nproc": 3, "checkpoint": "ckpt", "save_every": 10, "train": train}),
    )
    run_dir = run_dir_of(tmp_path)
    eventually(lambda: committed(run_dir) >= 5, within_s=60, what="five steps")
    os.kill(worker_pid(run_dir, 1), signal.SIGKILL)
    code, out, err = end(process)
    assert code == 0, err
    told = json.loads(out.strip().splitlines()[-1])
    assert told["value"] == whole(epochs=6), "the bits differ from the undisturbed run"
    assert told["step"] == 42
    events = read_events(run_dir)
    sizes = [len(e["workers"]) for e in events if e["event"] == "generation.formed"]
    assert sizes[:3] == [3, 2, 3], "killed, then whole again"
    tiers = [e["step"] for e in events if e["event"] == "checkpoint.committed"]
    assert 42 in tiers, "the last step is saved"
    assert not alive(told["pid"])


def test_it_goes_on_from_its_checkpoint_with_another_number_of_workers(tmp_path: Path) -> None:
    first = job(tmp_path, nproc=3, checkpoint="ckpt", train={"epochs": 2})
    assert first["step"] == 14
    second = job(tmp_path, nproc=1, checkpoint="ckpt", train={"epochs": 4})
    assert resumed(second["value"]) == resumed(whole(epochs=4))
    third = job(tmp_path, nproc=4, checkpoint="ckpt", train={"epochs": 6})
    assert resumed(third["value"]) == resumed(whole(epochs=6))
    again = job(tmp_path, nproc=2, checkpoint="ckpt", train={"epochs": 6})
    assert again["value"]["digest"] == third["value"]["digest"], "a finished job stays finished"
    assert again["step"] == 42


def test_an_interrupted_run_saves_and_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    options = {**QUIET, "checkpoint": "ckpt", "train": {"epochs": 6, "pause_s": 0.05}}
    process = start(tmp_path, str(JOB), json.dumps(options))
    run_dir = run_dir_of(tmp_path)
    eventually(lambda: committed(run_dir) >= 4, within_s=60, what="four steps")
    process.send_signal(signal.SIGTERM)
    code, _, err = end(process)
    assert code == 128 + signal.SIGTERM, err
    value = job(tmp_path, nproc=3, checkpoint="ckpt", train={"epochs": 6})["value"]
    assert resumed(value) == resumed(whole(epochs=6))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    job(tmp_path, checkpoint="ckpt", save_every=10, train={"steps": 20})
    packs = sorted((tmp_path / "ckpt").glob("step-000000020/*/packs/*.pack"))
    assert len(packs) == 2
    data = bytearray(packs[1].read_bytes())
    data[4100] ^= 1  # behind the 4 KiB header: a byte of the first tensor
    packs[1].write_bytes(data)
    value = job(tmp_path, nproc=3, checkpoint="ckpt", train={"steps": 30})["value"]
    assert resumed(value) == resumed(whole(steps=30))
    events = [e for path in (tmp_path / "ckpt" / "runs").iterdir() for e in read_events(path)]
    assert 10 in [e["step"] for e in events if e["event"] == "restore.finished"]
    problems = [e["error"] for e in events if e["event"] == "checkpoint.failed"]
    assert any(packs[1].name in problem for problem in problems), problems


@pytest.mark.parametrize("damage", ["a pack is gone", "a pack cannot be read"])
def test_a_checkpoint_that_cannot_be_read_is_told_by_its_code(tmp_path: Path, damage: str) -> None:
    job(tmp_path, checkpoint="ckpt", train={"steps": 4})
    pack = sorted((tmp_path / "ckpt").glob("step-*/*/packs/*.pack"))[0]
    pack.unlink()
    if damage == "a pack cannot be read":
        pack.mkdir()
    options = {**QUIET, "checkpoint": "ckpt", "train": {"steps": 6}}
    code, sentence = refused(tmp_path, str(JOB), json.dumps(options))
    assert (code, pack.name in sentence) == (6, True), sentence


def test_a_save_between_epochs_is_of_the_state_that_was_evaluated(tmp_path: Path) -> None:
    told = job(tmp_path, nproc=3, checkpoint="ckpt", train={"epochs": 2, "save_epochs": True})
    assert told["value"]["saved"] == [[True, 7], [True, 14]]
    listed = subprocess.run(
        [sys.executable, "-m", "ckpt.cli", "ls", "--json", "ckpt"],
        cwd=tmp_path, env=environ(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = {row["step"]: row for row in json.loads(listed.stdout)["checkpoints"]}
    curve = told["value"]["curve"]
    assert [rows[7]["values"]["accuracy"], rows[14]["values"]["accuracy"]] == [
        curve[0][1],
        curve[1][1],
    ]
    assert rows[7]["values"]["loss"] > 0
    value = job(tmp_path, nproc=2, checkpoint="ckpt", resume=7, train={"epochs": 2})["value"]
    assert resumed(value) == resumed(whole(epochs=2))


def test_a_resume_at_a_short_step_gets_what_is_prepared_in_the_loop_body(tmp_path: Path) -> None:
    train = {"program": "hidden", "late_average": True}
    options = {"nproc": 3, "checkpoint": "ckpt", "guard_every": 1}
    job(tmp_path, **options, train={**train, "steps": 6})  # the seventh has 3 micro-batches
    value = job(tmp_path, **options, save_every=1, train={**train, "steps": 10})["value"]
    assert value == whole(**train, steps=10)


def test_hidden_state_comes_back_and_what_nobody_claims_is_told(tmp_path: Path) -> None:
    train = {"program": "hidden", "scaler": True, "explode_at": 6}
    expected = whole(steps=16, **train)
    job(tmp_path, checkpoint="ckpt", train={"steps": 8, **train})
    later = {"steps": 16, "late_average": True, **train}
    value = job(tmp_path, nproc=3, checkpoint="ckpt", train=later)["value"]
    assert value == expected
    forgotten = {"steps": 17, "forget": True, **train}
    events_path = job(tmp_path, checkpoint="ckpt", train=forgotten)["events"]
    told = [
        e["names"] for e in read_events(Path(events_path).parent) if e["event"] == "state.unclaimed"
    ]
    assert told == [["AveragedModel0", "seen (per virtual rank)"]]


def test_losing_every_worker_goes_back_to_the_newest_checkpoint(tmp_path: Path) -> None:
    options = {
        **QUIET,
        "checkpoint": "ckpt",
        "save_every": 5,
        "train": {"epochs": 6, "pause_s": 0.05},
    }
    process = start(tmp_path, str(JOB), json.dumps(options))
    run_dir = run_dir_of(tmp_path)
    eventually(lambda: committed(run_dir) >= 8, within_s=60, what="eight steps")
    for slot in (0, 1):
        os.kill(worker_pid(run_dir, slot), signal.SIGKILL)
    code, out, err = end(process)
    assert code == 0, err
    value = json.loads(out.strip().splitlines()[-1])["value"]
    assert resumed(value) == resumed(whole(epochs=6))
    restored = [e["step"] for e in read_events(run_dir) if e["event"] == "restore.finished"]
    assert restored
    assert min(restored) >= 5


def test_two_runs_in_one_script(tmp_path: Path) -> None:
    told = job(
        tmp_path,
        job="one",
        train={"steps": 5},
        again={**QUIET, "job": "two", "train": {"steps": 7}},
    )
    assert told["first"] == whole(steps=5)
    assert told["value"] == whole(steps=7)


def test_two_hosts_share_a_job_through_etcd(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with contextlib.closing(_Etcd(tmp_path / "etcd")) as etcd:
        options = {
            **QUIET,
            "etcd": [etcd.endpoint],
            "job": "shared",
            "nodes": "2:2",
            "nproc": 1,
            "train": {"epochs": 2},
        }
        processes = [
            start(tmp_path / name, str(JOB), json.dumps({**options, "node": name}))
            for name in ("a", "b")
        ]
        ends = [end(process) for process in processes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    values = [json.loads(out.strip().splitlines()[-1])["value"] for _, out, _ in ends]
    assert whole(epochs=2) in values, "the main worker's host has the value"


class _Etcd:
    def __init__(self, directory: Path) -> None:
        self._server = EtcdServer(directory, log_path=directory.with_suffix(".log"))
        self._server.start()
        self.endpoint = self._server.endpoint

    def close(self) -> None:
        self._server.stop()


def test_status_events_save_and_stop_from_another_shell(tmp_path: Path) -> None:
    options = {**QUIET, "checkpoint": "ckpt", "train": {"epochs": 60, "pause_s": 0.03}}
    process = start(tmp_path, str(JOB), json.dumps(options))
    run_dir = run_dir_of(tmp_path)
    eventually(lambda: committed(run_dir) >= 3, within_s=60, what="three steps")

    def elastic(*arguments: str) -> str:
        code, out, err = end(start(tmp_path, "-m", "elastic.cli", *arguments))
        assert code == 0, err
        return out

    seen = json.loads(elastic("status", "ckpt", "--json"))
    assert [row["rank"] for row in seen["world"]] == [0, 1]
    assert seen["committed_step"] >= 3
    elastic("save", "ckpt")
    eventually(
        lambda: any(e["event"] == "checkpoint.committed" for e in read_events(run_dir)),
        within_s=30,
        what="the checkpoint that was asked for",
    )
    lines = elastic("events", "ckpt", "--json", "--name", "step.committed").splitlines()
    assert {json.loads(line)["event"] for line in lines} == {"step.committed"}
    elastic("stop", "ckpt")
    code, _, err = end(process)
    assert code == 128 + signal.SIGTERM, err
    listed = end(start(tmp_path, "-m", "ckpt.cli", "ls", "ckpt", "--json"))
    assert listed[0] == 0
    assert end(start(tmp_path, "-m", "ckpt.cli", "verify", "ckpt"))[0] == 0


def test_only_the_main_workers_output_is_shown_and_once(tmp_path: Path) -> None:
    code, out, _ = end(
        start(tmp_path, str(JOB), json.dumps({**QUIET, "train": {"steps": 3, "say": True}}))
    )
    assert code == 0
    assert out.count("hello from the main worker") == 1


# -- what cannot work -------------------------------------------------------------------------

SCRIPT = """
import elastic, torch
from torch.utils.data import DataLoader, TensorDataset

def train(ctx):
    model = torch.nn.Linear(4, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for _ in ctx.epochs(2):
        for (x,) in loader:
            BODY
    return VALUE

if __name__ == "__main__":
    elastic.run(CALL)
"""
STEP = "model(x).sum().backward(); optimizer.step()"


def script(
    path: Path,
    *,
    call: str = "train, nproc=2, console='off'",
    body: str = STEP,
    width: int = 2,
    value: str = "None",
) -> str:
    text = SCRIPT.replace("BODY", body).replace("WIDTH", str(width)).replace("VALUE", value)
    path.write_text(text.replace("CALL", call))
    return str(path)


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        ("train, nproc=0", 2, "nproc"),
        ("train, nprocs=2", 2, "nproc"),
        ("train, nproc=4, virtual_ranks=2", 2, "virtual_ranks"),
        ("lambda ctx: None", 2, "put train in a file"),
        ("train, nproc=1, checkpoint='/proc/none'", 2, "/proc/none"),
        ("train, nproc=1, etcd=['127.0.0.1:1'], job='x'", 2, "127.0.0.1:1"),
        ("train, nproc=1000", 2, "GiB"),
        ("train, nproc=1, resume=7, checkpoint='c'", 2, "resume"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_costs_nothing(
    tmp_path: Path, call: str, code: int, says: str
) -> None:
    found, sentence = refused(tmp_path, script(tmp_path / "job.py", call=f"{call}, console='off'"))
    assert says in sentence
    assert found == code


def test_an_unknown_environment_name_is_named_with_the_nearest(tmp_path: Path) -> None:
    code, sentence = refused(tmp_path, script(tmp_path / "job.py"), EVERSTEP_NPROCS="2")
    assert code == 2
    assert "EVERSTEP_NPROCS" in sentence
    assert "EVERSTEP_NPROC" in sentence.replace("EVERSTEP_NPROCS", "")


def test_an_unknown_option_and_a_missing_script_are_refused(tmp_path: Path) -> None:
    script(tmp_path / "job.py")
    code, _, err = end(start(tmp_path, "-m", "elastic.cli", "run", "--nprocs", "2", "job.py"))
    assert code == 2
    assert "--nproc" in err
    code, _, err = end(start(tmp_path, "-m", "elastic.cli", "run", "none.py"))
    assert code == 2
    assert "none.py" in err


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('marker text')", "marker text"),
        ("model(x).sum().backward()", "optimizer.step()"),
        (f"{STEP}; break", "ctx.stop()"),
        (f"torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); {STEP}", "ctx.clip_grad_norm_"),
    ],
)
def test_user_code_that_fails_ends_the_run_with_code_5(
    tmp_path: Path, body: str, says: str
) -> None:
    code, sentence = refused(tmp_path, script(tmp_path / "job.py", body=body))
    assert says in sentence
    assert code == 5


def test_a_value_that_cannot_be_handed_on_is_named(tmp_path: Path) -> None:
    code, sentence = refused(tmp_path, script(tmp_path / "job.py", value="{'a': object()}"))
    assert "['a']" in sentence
    assert code == 5


def test_run_inside_run_is_refused(tmp_path: Path) -> None:
    code, sentence = refused(
        tmp_path, script(tmp_path / "job.py", body="elastic.run(train, nproc=1)")
    )
    assert "inside" in sentence
    assert code == 2


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    call = "train, nproc=1, checkpoint='ckpt', console='off'"
    code, _, err = end(start(tmp_path, script(tmp_path / "job.py", call=call)))
    assert code == 0, err
    code, sentence = refused(tmp_path, script(tmp_path / "job.py", call=call, width=3))
    assert code == 2
    assert "weight" in sentence
    assert "[2, 4]" in sentence
    assert "[3, 4]" in sentence


def test_a_second_live_run_of_a_job_is_refused(tmp_path: Path) -> None:
    options = {**QUIET, "checkpoint": "ckpt", "train": {"epochs": 60, "pause_s": 0.05}}
    process = start(tmp_path, str(JOB), json.dumps(options))
    run_dir_of(tmp_path)
    code, sentence = refused(tmp_path, str(JOB), json.dumps(options))
    assert code == 2
    assert "is running" in sentence
    process.send_signal(signal.SIGINT)
    assert end(process)[0] == 128 + signal.SIGINT


def test_a_bucket_that_is_not_there_is_named(tmp_path: Path) -> None:
    from chaos.s3_server import S3Server

    server = S3Server(tmp_path / "s3")
    server.start()
    try:
        call = "train, nproc=1, remote='s3://no-such-bucket/job', console='off'"
        path = script(tmp_path / "job.py", call=call)
        code, sentence = refused(tmp_path, path, **server.client_environment())
        assert code == 2
        assert "no-such-bucket" in sentence
        wrong = {**server.client_environment(), "AWS_SECRET_ACCESS_KEY": "wrong"}
        code, sentence = refused(tmp_path, path, **wrong)
        assert code == 2
        assert "no-such-bucket" in sentence
    finally:
        server.stop()
