"""Whole agents with a real etcd and real processes: start, death, ends of every kind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import stat
from pathlib import Path

import pytest

from tests.agent_process import AgentUnderTest, alive, kill
from tests.support import eventually

pytestmark = pytest.mark.integration


def nothing_left(agent: AgentUnderTest, pids: list[int]) -> None:
    """Assert that no process, no etcd data and no port of a run is left."""
    eventually(lambda: not any(map(alive, pids)), within_s=5.0, what="every process ends")
    assert not (agent.run_dir / "etcd").exists()


def test_a_run_ends_with_its_value_and_leaves_nothing_behind(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", script={"steps": 20}, nproc=3) as agent:
        agent.training(3)
        pids = agent.pids()
        assert len(pids) >= 5  # three workers, the fork server, etcd
        assert agent.wait() == 0
    result = agent.result()
    assert result["value"] == {"answer": 42}
    assert result["exit_code"] == 0
    assert result["step"] == 20
    assert result["generation"] == 1
    nothing_left(agent, pids)
    assert stat.S_IMODE((agent.run_dir / "agent.json").stat().st_mode) == 0o600
    assert "says hello" in next((agent.run_dir / "logs").glob("worker-*.log")).read_text()
    names = {event["event"] for event in agent.events()}
    wanted = "agent.started coord.connected member.joined worker.started worker.ready "
    wanted += "generation.formed worker.exited run.finished agent.stopped"
    assert set(wanted.split()) <= names


def test_a_killed_worker_is_left_out_within_milliseconds_and_comes_back(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", nproc=3) as agent:
        seen = agent.training(3)
        victim = seen["world"][1]
        kill(victim["pid"])
        back = agent.training(3, generation=3)
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 128 + signal.SIGTERM
    worlds = {event["generation"]: event for event in agent.events("generation.formed")}
    assert [worlds[g]["mode"] for g in (1, 2, 3)] == ["now", "now", "boundary"]
    assert victim["worker_id"] not in worlds[2]["workers"]
    assert worlds[2]["workers"] == [w for w in worlds[1]["workers"] if w != victim["worker_id"]]
    assert worlds[3]["workers"][:2] == worlds[2]["workers"]
    assert "was killed by signal 9" in worlds[2]["reason"]
    (exited,) = [e for e in agent.events("worker.exited") if e["signal"] == 9]
    assert exited["worker_id"] == victim["worker_id"]
    assert back["failures"] == 1
    assert back["reshapes"] == 2


def test_a_worker_that_leaves_children_takes_them_with_it(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", entry="with_child", nproc=1) as agent:
        seen = agent.training(1)
        worker = seen["world"][0]["pid"]
        children = [pid for pid in agent.pids() if os.getpgid(pid) == worker and pid != worker]
        assert len(children) == 1
        kill(worker)
        eventually(lambda: not alive(children[0]), what="the group ends with its leader")
        agent.training(1, generation=2)
        pids = agent.pids()
        agent.signal(signal.SIGTERM)
        agent.wait()
    nothing_left(agent, pids)  # also the ones in sessions of their own


@pytest.mark.allow_leak(reason="asserted here")
def test_an_agent_that_is_killed_leaves_no_process_behind(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", nproc=3) as agent:
        agent.training(3)
        pids = agent.pids()
        kill(agent.pid)
        agent.process.wait()
        eventually(lambda: not any(map(alive, pids)), within_s=5.0, what="all die with it")


def test_a_frozen_worker_is_suspected_and_then_replaced(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", nproc=2, hang_timeout_s=0.5) as agent:
        seen = agent.training(2)
        victim = seen["world"][0]
        os.kill(victim["pid"], signal.SIGSTOP)
        eventually(lambda: agent.events("worker.suspected"), what="it is suspected")
        agent.training(2, generation=3)
    (suspected,) = agent.events("worker.suspected")
    assert suspected["pid"] == victim["pid"]
    worlds = {event["generation"]: event for event in agent.events("generation.formed")}
    assert "was stopped for 0.5 s" in worlds[2]["reason"]
    waited_s = worlds[2]["t_mono_s"] - suspected["t_mono_s"]
    assert 0.5 <= waited_s < 1.5


def test_a_stopped_run_ends_after_a_step_with_the_signals_code(tmp_path: Path):
    agent = AgentUnderTest(tmp_path / "run")
    agent.start(launcher=["nohup"])
    try:
        first = agent.training(2)["step"]
        agent.signal(signal.SIGHUP)  # was ignored at the start, and stays so
        agent.signal(signal.SIGUSR1)  # not a notice signal here, and not fatal by default either
        eventually(lambda: agent.status()["step"] > first + 5, what="it trains on")
        pids = agent.pids()
        agent.signal(signal.SIGINT)
        assert agent.wait() == 128 + signal.SIGINT
    finally:
        agent.end()
    assert agent.result()["cause"] == "stopped by SIGINT"
    assert agent.result()["step"] > 0
    nothing_left(agent, pids)


def test_workers_that_do_not_stop_are_killed_after_the_grace_time(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", entry="stubborn", grace_s=0.5) as agent:
        agent.training(2)
        pids = agent.pids()
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 128 + signal.SIGTERM
    assert "had not ended within 0.5 s" in agent.result()["cause"]
    nothing_left(agent, pids)


def test_a_second_interrupt_does_not_wait(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", entry="stubborn", grace_s=60) as agent:
        agent.training(2)
        agent.signal(signal.SIGINT)
        eventually(lambda: agent.status()["phase"] == "stopping")
        agent.signal(signal.SIGINT)
        assert agent.wait(within_s=10) == 128 + signal.SIGINT


def test_the_agent_ends_with_its_caller(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run") as agent:
        agent.training(2)
        pids = agent.pids()
        agent.hang_up()
        assert agent.wait() == 128 + signal.SIGTERM
    nothing_left(agent, pids)


def test_a_failing_train_function_ends_the_run_with_its_traceback(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", script={"fail_at": 5}, nproc=3) as agent:
        assert agent.wait() == 5
    result = agent.result()
    assert "ValueError: the marker text" in result["cause"]
    assert result["traceback"] == "Traceback: the marker text"
    assert result["worker"] in result["cause"]


def test_a_misconfigured_worker_ends_the_run_at_once_with_its_sentence(tmp_path: Path):
    script = {"fail_at": 1, "kind": "misconfigured", "message": "the model has changed"}
    with AgentUnderTest(tmp_path / "run", script=script) as agent:
        assert agent.wait() == 2
    assert agent.result()["cause"] == "the model has changed"
    assert len(agent.events("worker.started")) == 2


def test_a_worker_that_dies_before_it_is_ready_is_not_tried_for_ever(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", entry="dies_at_once", nproc=1) as agent:
        assert agent.wait() == 5
    assert "exited with code 3" in agent.result()["cause"]
    assert len(agent.events("worker.started")) == 3


def test_an_operator_looks_and_stops_and_a_stranger_is_refused(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run") as agent:
        seen = agent.training(2)
        keys = "job node pid phase reason generation world step committed_step failures reshapes"
        assert set(keys.split()) <= seen.keys()
        assert seen["phase"] == "formed"
        assert {"worker_id", "node", "rank", "pid", "state", "step", "committed"} <= seen["world"][
            0
        ].keys()
        before, first = _revision(agent), seen["step"]
        eventually(lambda: agent.status()["step"] > first + 50, what="fifty steps")
        assert _revision(agent) == before, "steps ask the store for nothing"
        code, text = agent.ask("/metrics")
        assert code == 200
        assert 'everstep_world_size{job="job"' in text
        code, _ = agent.ask("/stop", method="POST", token="wrong")
        assert code == 401
        code, _ = agent.ask("/stop", method="POST")
        assert code == 202
        assert agent.wait() == 128 + signal.SIGTERM
    assert agent.result()["cause"] == "stopped by an operator"
    (stranger,) = agent.events("stranger.refused")
    assert stranger["address"].startswith("127.0.0.1:")


def test_the_etcd_and_the_fork_server_of_a_run_may_die(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", nproc=2) as agent:
        seen = agent.training(2)
        workers = {row["pid"] for row in seen["world"]}
        helpers = {
            mark: pid
            for pid in agent.pids()
            for mark in (b"--data-dir", b"--preload")
            if mark in Path(f"/proc/{pid}/cmdline").read_bytes() and pid not in workers
        }
        assert len(helpers) == 2
        for pid in helpers.values():
            kill(pid)
        first = agent.status()["step"]
        eventually(lambda: agent.status()["step"] > first + 10, what="training goes on")
        eventually(lambda: agent.status()["session"] == "live", what="etcd is back")
        kill(seen["world"][1]["pid"])
        agent.training(2, generation=3)


def test_a_lease_that_is_gone_is_renewed_and_nobody_is_voted_out(tmp_path: Path):
    """FC-38: a keep-alive of a dead lease looks like success; the agent must register anew."""
    with AgentUnderTest(tmp_path / "run", nproc=2) as agent:
        agent.training(2)
        for lease in _etcd(agent, "/v3/lease/leases")["leases"]:
            _etcd(agent, "/v3/lease/revoke", {"ID": lease["ID"]})
        eventually(lambda: len(agent.events("member.expired")) == 1, what="its record is gone")
        eventually(lambda: len(agent.events("member.joined")) == 2, what="it registers again")
        first = agent.status()["step"]
        eventually(lambda: agent.status()["step"] > first + 5, what="training goes on")
        assert agent.status()["generation"] == 1
        kill(agent.status()["world"][0]["pid"])
        agent.training(2, generation=3)


def _revision(agent: AgentUnderTest) -> int:
    return int(_etcd(agent, "/v3/maintenance/status")["header"]["revision"])


def _etcd(agent: AgentUnderTest, path: str, body: dict | None = None) -> dict:
    """Ask the run's own etcd past the agent's client."""
    connection = http.client.HTTPConnection(agent.facts()["etcd"][0], timeout=5)
    connection.request("POST", path, body=json.dumps(body or {}))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer
