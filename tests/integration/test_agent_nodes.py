"""Two agents of one job on one machine, each with its own directory, and an etcd beside them."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import numpy as np
import pytest

import ckpt
from elastic.membership.etcd_server import EtcdServer
from tests.agent_process import AgentUnderTest, alive, kill
from tests.support import eventually

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with EtcdServer(tmp_path_factory.mktemp("etcd") / "data") as server:
        yield server.endpoint


@pytest.fixture
def node(tmp_path: Path, etcd: str, request: pytest.FixtureRequest):
    """Start agents by name; all are ended with the test."""
    with contextlib.ExitStack() as stack:

        def start(name: str, *, run: str = "run", **config) -> AgentUnderTest:
            settings = {
                "job": request.node.name.replace("[", "-").rstrip("]")[:60],
                "etcd": [etcd],
                "nodes": "1:2",
                "nproc": 1,
                "node": name,
                "lease_ttl_s": 2.0,
                **config,
            }
            return stack.enter_context(AgentUnderTest(tmp_path / f"{name}-{run}", **settings))

        yield start


def test_two_nodes_make_one_world_and_end_together(node):
    a = node("a", nodes="2:2", script={"steps": 40})
    b = node("b", nodes="2:2", script={"steps": 60})
    seen = a.training(2)
    assert [row["node"] for row in seen["world"]] == ["a", "b"]
    assert b.training(2)["world"][0]["worker_id"] == seen["world"][0]["worker_id"]
    assert a.wait() == 0
    assert b.wait() == 0
    assert a.result()["value"] == {"answer": 42}, "the main rank is on this node"
    assert b.result()["value"] is None
    assert a.result()["generation"] == b.result()["generation"] == 1


def test_leaving_is_not_closing_and_a_node_may_come_back_again_and_again(node):
    a = node("a", nodes="1:2")
    for number in range(3):
        b = node("b", run=f"run{number}", nodes="1:2")
        a.training(2, generation=2 * number + 1)
        b.training(2, generation=2 * number + 1)
        b.signal(signal.SIGTERM)
        assert b.wait() == 128 + signal.SIGTERM
        a.training(1, generation=2 * number + 2)
    assert a.process.poll() is None
    assert a.status()["failures"] == 0


def test_a_death_on_one_node_is_followed_by_the_other(node):
    a, b = node("a", nodes="2:2"), node("b", nodes="2:2")
    seen = a.training(2)
    victim = next(row for row in b.status()["world"] if row["node"] == "b")
    # Fewer than two nodes for a moment: the survivor pauses, and goes on with the new one.
    kill(victim["pid"])
    after = a.training(2, generation=2)
    assert after["world"][0]["worker_id"] == seen["world"][0]["worker_id"]
    assert after["world"][1]["worker_id"] != victim["worker_id"]


def test_a_lost_host_is_left_out_when_its_lease_has_run_out(node, tmp_path: Path):
    pause = tmp_path / "pause"
    script = {"pause_while": str(pause)}
    a, b = node("a", script=script), node("b", script=script)
    a.training(2)
    pids = b.pids()
    # A lapsed lease alone is no evidence while agreements complete; without b none does.
    pause.touch()
    kill(b.pid)
    eventually(lambda: not any(map(alive, pids)), what="its workers die with it")
    seen = eventually(
        lambda: (s := a.status())["generation"] > 1 and s, within_s=15, what="it is left out"
    )
    assert [row["node"] for row in seen["world"]] == ["a"]
    assert "node b is gone" in seen["reason"]
    pause.unlink()
    node("b", run="again", script=script)
    a.training(2, generation=3)


def test_other_settings_and_a_name_in_use_are_refused(node):
    a = node("a")
    a.training(1)
    other, same = node("b", seed=7), node("a", run="again")
    assert other.wait() == 2
    assert "seed is 7 here and 0 in the job" in other.result()["cause"]
    assert same.wait() == 2
    assert "a" in same.result()["cause"]
    assert a.status()["generation"] == 1


def test_a_job_that_has_ended_can_be_started_again_under_its_name(node):
    first = node("a", script={"steps": 10}, nodes="1:1")
    assert first.wait() == 0
    again = node("a", run="again", script={"steps": 10}, nodes="1:1", seed=3)
    assert again.wait() == 0
    assert again.result()["generation"] == 2, "generations go on"


def test_an_operator_stops_the_job_on_all_nodes(node):
    a, b = node("a", nodes="2:2"), node("b", nodes="2:2")
    a.training(2)
    b.training(2)
    assert b.ask("/stop", method="POST")[0] == 202
    assert a.wait() == 128 + signal.SIGTERM
    assert b.wait() == 128 + signal.SIGTERM


def test_packs_of_two_nodes_are_one_checkpoint(node, tmp_path: Path):
    remote = str(tmp_path / "remote")
    nodes = [
        node(
            name,
            nodes="2:2",
            entry="save",
            script={"steps": 20, "save_every": 20, "save_as": 20},
            checkpoint=str(tmp_path / name),
            remote=remote,
        )
        for name in ("a", "b")
    ]
    for agent in nodes:
        assert agent.wait() == 0
    found = ckpt.open_latest([remote])
    assert found is not None
    assert found.step == 20
    rows = [found.read("w", row, row + 1).view(np.float32)[0] for row in range(8)]
    assert rows == [0, 1, 2, 3, 4, 5, 6, 7]


def test_an_etcd_that_is_not_there_is_one_sentence(tmp_path: Path):
    with AgentUnderTest(tmp_path / "run", etcd=["127.0.0.1:9"], job="nowhere") as agent:
        assert agent.wait() == 2
    assert "127.0.0.1:9" in agent.result()["cause"]
