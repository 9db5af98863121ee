"""The event table and the log: what may be written, what is read back, what a crash leaves."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from elastic.event_table import CONTEXT, EVENTS, UnknownEvent, check, undeclared
from elastic.events import EventLog, EventTail, read_events, read_file
from elastic.render import line
from tests.tidy.house import SHIPPED, python_files, shown, tree


class StepClock:
    """A clock that a test sets."""

    def __init__(self):
        self.at_s = 0.0

    def now_s(self):
        return self.at_s

    def wall(self):
        return f"2026-01-01T00:00:{self.at_s:09.6f}+00:00"


@pytest.fixture
def clock():
    return StepClock()


@pytest.fixture
def new_log(tmp_path, clock):
    made = []

    def make(name, process="worker", **context):
        path = tmp_path / "events" / f"{name}.jsonl"
        made.append(EventLog(path, process, clock=clock, **context))
        return made[-1]

    yield make
    for log in made:
        log.close()


# -- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "complaint"),
    [
        ("worker.vanished", {}, "no event is named 'worker.vanished'"),
        ("worker.started", {"slot": 1}, "worker.started lacks pid"),
        ("step.redone", {"step": None}, "step.redone lacks step"),
        ("worker.suspected", {}, "lacks pid, evidence"),
    ],
)
def test_what_the_table_does_not_allow_is_not_written(new_log, name, fields, complaint):
    log = new_log("w")
    with pytest.raises(UnknownEvent, match=complaint):
        log.emit(name, **fields)
    assert read_file(log.path) == []


def test_a_required_field_may_be_null_unless_every_record_has_it():
    exited = {"pid": 7, "exit_code": 1, "signal": None, "evidence": ""}
    check("worker.exited", exited)
    with pytest.raises(UnknownEvent):
        check("step.redone", {"step": None})


def test_a_context_field_counts_as_given(new_log):
    log = new_log("w", step=3)
    log.emit("step.redone")
    assert read_file(log.path)[0]["step"] == 3


def test_a_context_that_no_record_has_is_refused(new_log):
    with pytest.raises(UnknownEvent, match="colour"):
        new_log("w", colour="red")


def emits():
    """Every `x.emit("name", field=...)`, and the agent's `note`, in what is shipped."""
    for path in python_files(*SHIPPED):
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("emit", "note", "_note")
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                yield f"{shown(path)}:{node.lineno}", node


def test_every_emitted_event_and_field_stands_in_the_table():
    wrong = []
    for place, call in emits():
        name = call.args[0].value
        fields = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
        if name not in EVENTS:
            wrong.append(f"{place} {name}")
        elif extra := undeclared(name, fields):
            wrong.append(f"{place} {name}: {extra}")
        elif len(fields) == len(call.keywords):  # no **fields that could hold the rest
            missing = set(EVENTS[name].fields) - set(fields) - set(CONTEXT)
            wrong += [f"{place} {name} lacks {sorted(missing)}"] if missing else []
    assert wrong == []
    assert len({call.args[0].value for _, call in emits()}) > 25  # the search finds them


def test_every_event_of_the_table_has_a_sentence_of_its_own():
    generic = [name for name in EVENTS if line({"event": name, **sample(name)}).startswith(name)]
    assert generic == []


SAMPLES = {
    "config": {"nproc": 2},
    "origins": {"nproc": "argument"},
    "member": "n-1",
    "workers": ["n-1.0-a"],
    "log": {"loss": 1.5},
    "values": {"accuracy": 0.9},
    "report": [],
    "names": ["averaged"],
    "counts": [1, 3],
    "before": [2, 2],
    "worker_id": "n-1.0-abcdef",
    "stack": 'Current thread 0x1 (most recent call first):\n  File "train.py", line 7 in train',
    "generation": 1,
}


def sample(name):
    fields = (*EVENTS[name].fields, "worker_id", "generation", "step", "rank")
    return {field: SAMPLES.get(field, 1) for field in fields}


# -- writing --------------------------------------------------------------------------------------


def test_every_record_has_the_context_its_name_first(new_log, clock):
    clock.at_s = 12.5
    log = new_log("w", run="r1", node="n-1", worker_id="n-1.0-a")
    log.bind(generation=2, rank=0)
    log.emit("worker.ready", layout="x")
    (text,) = log.path.read_text().splitlines()
    record = json.loads(text)
    assert text.startswith('{"event":"worker.ready"')
    assert {field: record[field] for field in CONTEXT} == {
        "event": "worker.ready",
        "run": "r1",
        "process": "worker",
        "node": "n-1",
        "worker_id": "n-1.0-a",
        "generation": 2,
        "rank": 0,
        "step": None,
        "t_mono_s": 12.5,
        "t_wall": "2026-01-01T00:00:12.500000+00:00",
    }
    assert record["layout"] == "x"


def test_a_field_wins_over_the_context(new_log):
    log = new_log("w", generation=1)
    log.emit("generation.fenced", generation=4)
    assert read_file(log.path)[0]["generation"] == 4


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (np.float32(0.5), 0.5),
        ((1, 2), [1, 2]),
        ({"deep": [float("-inf")]}, {"deep": ["-inf"]}),
    ],
)
def test_lines_are_strict_json_whatever_was_logged(new_log, value, written):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    log = new_log("w")
    log.emit("evaluate.finished", values=value)
    (text,) = log.path.read_text().splitlines()
    assert json.loads(text, parse_constant=refuse)["values"] == written


def test_the_log_belongs_to_its_owner_alone(new_log):
    assert new_log("w").path.stat().st_mode & 0o077 == 0


def test_a_full_disk_costs_lines_and_not_the_run(new_log):
    log = new_log("w")
    log.emit("worker.ready")
    good = os.dup(log._file._fd)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file._fd)
    log.emit("worker.ready")
    log.emit("worker.ready")
    os.dup2(good, log._file._fd)
    log.emit("worker.ready")
    log.emit("worker.ready")
    for fd in (good, full):
        os.close(fd)
    assert [r.get("lost_before") for r in read_file(log.path)] == [None, 2, None]


# -- reading --------------------------------------------------------------------------------------


def test_records_of_all_processes_are_merged_by_their_time(tmp_path, new_log, clock):
    agent, worker = new_log("agent", "agent"), new_log("worker")
    for at_s, log, step in [(3.0, worker, 3), (1.0, agent, 1), (2.0, worker, 2)]:
        clock.at_s = at_s
        log.emit("step.redone", step=step)
    assert [r["step"] for r in read_events(tmp_path)] == [1, 2, 3]


def test_a_torn_last_line_is_left_out(tmp_path, new_log):
    log = new_log("w")
    log.emit("step.redone", step=1)
    with log.path.open("ab") as file:
        file.write(b'{"event":"step.redone","step":2,"t_mo')
    assert [r["step"] for r in read_events(tmp_path)] == [1]


def test_a_tail_returns_each_record_once_and_waits_for_the_end_of_a_line(tmp_path, new_log):
    tail = EventTail(tmp_path)
    assert tail.read() == []
    log = new_log("w")
    log.emit("step.redone", step=1)
    assert [r["step"] for r in tail.read()] == [1]
    text = '{"event":"step.redone","step":2,"t_mono_s":0}\n'
    with log.path.open("a") as file:
        file.write(text[:20])
        file.flush()
        assert tail.read() == []
        file.write(text[20:])
    assert [r["step"] for r in tail.read()] == [2]
    new_log("late").emit("step.redone", step=9)
    assert [r["step"] for r in tail.read()] == [9]
    assert tail.read() == []


def test_no_run_directory_is_no_events(tmp_path):
    assert read_events(tmp_path / "nothing") == []
    assert EventTail(tmp_path / "nothing").read() == []


@pytest.mark.integration
def test_a_process_that_is_killed_while_it_writes_loses_at_most_its_last_line(tmp_path):
    code = (
        "import sys\n"
        "from elastic.events import EventLog\n"
        f"log = EventLog({str(tmp_path / 'events' / 'w.jsonl')!r}, 'worker')\n"
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    log.emit('step.redone', step=step)\n"
        "    if step == 500: print('go', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with process:
        assert process.stdout.readline() == b"go\n"
        process.kill()
    steps = [r["step"] for r in read_events(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 500
