"""Checkpoints through a whole agent: staged by workers, written by the service, committed."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

import ckpt
from tests.agent_process import AgentUnderTest, kill
from tests.support import eventually

pytestmark = pytest.mark.integration


def newest(root: Path):
    """Return the newest checkpoint of a directory, its rows checked."""
    found = ckpt.open_latest([str(root)])
    assert found is not None
    rows = np.concatenate([found.read("w", row, row + 1).view(np.float32) for row in range(8)])
    assert rows.tolist() == [float(row) for row in range(8) for _ in range(4)]
    return found


def test_staged_parts_become_a_checkpoint_and_the_last_one_is_waited_for(tmp_path: Path):
    root = tmp_path / "ckpt"
    # Both workers name the step alike: one World, one step number that never moves.
    with AgentUnderTest(
        tmp_path / "run",
        entry="save",
        script={"steps": 30, "save_every": 30, "save_as": 30},
        checkpoint=str(root),
    ) as agent:
        assert agent.wait() == 0
    assert newest(root).step == 30
    (committed,) = agent.events("checkpoint.committed")
    assert committed["step"] == 30
    assert committed["tier"] == "local"
    assert len(agent.events("checkpoint.written")) == 2
    stopped = agent.events("agent.stopped")[0]
    assert committed["t_mono_s"] < stopped["t_mono_s"]


def test_a_stopped_run_saves_first(tmp_path: Path):
    root = tmp_path / "ckpt"
    with AgentUnderTest(
        tmp_path / "run",
        entry="save",
        script={"save_as": 7},
        checkpoint=str(root),
        remote=str(tmp_path / "remote"),
    ) as agent:
        agent.training(2)
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 128 + signal.SIGTERM
    assert newest(root).step == 7
    assert newest(tmp_path / "remote").step == 7
    tiers = {event["tier"] for event in agent.events("checkpoint.committed")}
    assert tiers == {"local", "remote"}


def test_a_save_goes_on_when_the_worker_that_staged_it_is_dead(tmp_path: Path):
    root = tmp_path / "ckpt"
    with AgentUnderTest(
        tmp_path / "run", entry="save", script={"save_as": 5}, checkpoint=str(root)
    ) as agent:
        seen = agent.training(2)
        agent.ask("/save", method="POST")
        eventually(lambda: len(agent.events("checkpoint.written")) == 2)
        kill(seen["world"][1]["pid"])
        eventually(lambda: agent.events("checkpoint.committed"), what="it is committed")
        agent.signal(signal.SIGTERM)
        agent.wait()
    newest(root)


def test_a_save_without_all_its_parts_is_given_up_at_the_end(tmp_path: Path):
    root = tmp_path / "ckpt"
    with AgentUnderTest(
        tmp_path / "run",
        entry="save",
        script={"steps": 20, "save_every": 20, "save_as": 20, "dies_staging": 1},
        checkpoint=str(root),
    ) as agent:
        assert agent.wait() == 0
    assert agent.events("checkpoint.committed") == []
    (abandoned,) = agent.events("checkpoint.abandoned")
    assert abandoned["step"] == 20
    assert ckpt.open_latest([str(root)]) is None


def test_the_save_service_may_die(tmp_path: Path):
    root = tmp_path / "ckpt"
    with AgentUnderTest(
        tmp_path / "run", entry="save", script={"save_as": 5}, checkpoint=str(root)
    ) as agent:
        agent.training(2)

        def service():
            return [
                pid
                for pid in agent.pids()
                if b"ckpt.service" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]

        (first,) = eventually(service)
        kill(first)
        eventually(lambda: service() not in ([], [first]), what="another one is started")
        agent.ask("/save", method="POST")
        eventually(lambda: agent.status()["saves"]["last_committed_step"] == 5)
        assert agent.status()["saves"]["in_flight"] == []
        agent.signal(signal.SIGTERM)
        agent.wait()
    newest(root)


def test_a_place_that_cannot_be_written_ends_the_run_with_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("not a directory")
    with AgentUnderTest(
        tmp_path / "run", entry="save", checkpoint=str(tmp_path / "file" / "ckpt")
    ) as agent:
        assert agent.wait() == 2
    assert str(tmp_path / "file") in agent.result()["cause"]
