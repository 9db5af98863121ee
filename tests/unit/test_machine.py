"""The membership machine: single turns that transcripts would not show clearly."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.membership import commands as c
from elastic.membership import machine
from elastic.membership.machine import MOVES, IllegalMove, Phase
from elastic.membership.state import Session
from tests.membership_cluster import Cluster

ROOT = Path(__file__).parent.parent.parent


def trained(slots: int = 2, **config) -> Cluster:
    """One agent whose World has formed and done a step."""
    cluster = Cluster(slots=str(slots), **config)
    cluster.do("start a")
    for slot in range(slots):
        cluster.do(f"ready a.{slot}")
    cluster.do("formed")
    cluster.do("progress step=3")
    cluster.lines.clear()
    return cluster


def state_of(cluster: Cluster, name: str = "a"):
    return cluster.agents[name].state


def commands_of(cluster: Cluster, event: c.Event, name: str = "a") -> list[c.Command]:
    """Return what one event asks for, without carrying it out."""
    decision = machine.step(state_of(cluster, name), event, cluster.now_s)
    return [each for each in decision.commands if not isinstance(each, c.Note)]


def test_same_inputs_give_the_same_decision():
    cluster = trained()
    _, worker_id = cluster.find("a.1")
    event = c.WorkerDying(worker_id=worker_id, evidence="is exiting")
    first = machine.step(state_of(cluster), event, 5.0)
    assert machine.step(state_of(cluster), event, 5.0) == first


def test_a_death_becomes_one_write_with_world_and_own_record():
    cluster = trained(3)
    _, worker_id = cluster.find("a.1")
    asked = commands_of(cluster, c.WorkerDying(worker_id=worker_id, evidence="is exiting"))
    (write,) = [each for each in asked if isinstance(each, c.WriteWorld)]
    assert worker_id not in {worker.worker_id for worker in write.world.workers}
    assert worker_id not in {worker.worker_id for worker in write.member.workers}
    assert write.after_revision == cluster.store.world_revision


def test_every_move_in_the_table_leads_to_a_phase_that_has_a_row():
    assert set(MOVES) == set(Phase)
    for following in MOVES.values():
        assert following <= set(Phase)
    assert not MOVES[Phase.CLOSED]


def test_a_move_that_is_not_in_the_table_is_our_bug():
    cluster = trained()
    strange = replace(state_of(cluster), phase=Phase.STOPPING)  # FORMED by its facts
    with pytest.raises(IllegalMove, match="stopping to formed"):
        machine.step(strange, c.Woke(), cluster.now_s)


def test_a_closed_machine_decides_nothing():
    cluster = trained()
    cluster.do("finish all")
    assert state_of(cluster).phase is Phase.CLOSED
    assert commands_of(cluster, c.StopAsked(scope=c.Scope.JOB, cause="x", signal=2)) == []


def test_steady_state_asks_the_store_for_nothing():
    cluster = trained(4)
    before = cluster.store.revision
    for step in range(4, 60):
        cluster.do(f"progress step={step}")
        cluster.do("advance 0.25")
    assert cluster.store.revision == before


def test_nothing_is_proposed_while_the_session_is_lost():
    cluster = trained(2)
    _, worker_id = cluster.find("a.1")
    lost = replace(state_of(cluster), session=Session.LOST, session_at_s=99.0)
    event = c.WorkerDying(worker_id=worker_id, evidence="is exiting")
    decision = machine.step(lost, event, cluster.now_s)
    assert not any(isinstance(each, c.WriteWorld | c.WriteMember) for each in decision.commands)


def test_other_settings_than_the_jobs_end_this_node_alone_with_the_difference():
    cluster = Cluster(slots="1", nodes="1:2")
    cluster.entered = lambda name, clear: cluster.feed(
        name, c.AttemptEntered(differences=("seed is 1 here and 0 in the job",))
    )
    cluster.do("start a")
    outcome = state_of(cluster).ending.outcome
    assert outcome.exit_code == 2
    assert "seed is 1 here and 0 in the job" in outcome.cause
    assert cluster.store.result is None


def test_a_failed_save_ends_the_run_only_if_asked_for():
    event = c.SaveFailed(step=3, error="the disk is full")
    relaxed = trained()
    relaxed.feed("a", event)
    assert state_of(relaxed).ending is None
    strict = trained(fail_on_save_error="yes")
    strict.feed("a", event)
    assert state_of(strict).ending.outcome.exit_code == 6


def test_failures_budget_is_used_by_deaths_and_not_by_joins():
    cluster = trained(2, max_failures="2")
    for step in (5, 8):
        cluster.do("die a.1 signal=9")
        cluster.do("formed")
        cluster.do(f"progress step={step}")
        cluster.do("ready a.1")
        cluster.do("formed")
        cluster.do(f"progress step={step + 1}")
    assert state_of(cluster).phase is Phase.FORMED
    cluster.do("die a.1 signal=9")
    assert state_of(cluster).ending.outcome.exit_code == 5
    assert "max_failures is 2" in state_of(cluster).ending.outcome.cause


def test_reshapes_budget_ends_a_job_that_flaps():
    cluster = trained(2, max_reshapes="3")
    for step in (5, 8):
        cluster.do("die a.1 signal=9")
        cluster.do("formed")
        cluster.do(f"progress step={step}")
        cluster.do("ready a.1")
        cluster.do("formed")
    outcome = state_of(cluster).ending.outcome
    assert outcome.exit_code == 5
    assert "max_reshapes" in outcome.cause


def test_ten_kills_without_a_newer_step_end_the_run_and_nine_do_not():
    cluster = trained(2)
    for _ in range(9):
        cluster.do("die a.1 signal=9")
        cluster.do("formed")
        cluster.do("advance 31")
        cluster.do("ready a.1")
        cluster.do("formed")
    assert state_of(cluster).ending is None
    cluster.do("die a.1 signal=9")
    outcome = state_of(cluster).ending.outcome
    assert outcome.exit_code == 5
    assert "10 deaths without a newer step" in outcome.cause


def test_a_worker_that_exits_badly_after_the_end_is_told():
    cluster = trained(1)
    _, worker_id = cluster.find("a.0")
    cluster.hold()
    cluster.do("finish all")
    cluster.held = False
    queue, cluster.waiting = list(cluster.waiting), type(cluster.waiting)()
    for _, action in queue:
        action()  # the result is written; the worker is told to finish
    cluster.queue.clear()
    cluster.feed("a", c.WorkerReaped(worker_id=worker_id, exit_code=3, signal=None))
    outcome = state_of(cluster).ending.outcome
    assert outcome.exit_code == 5
    assert "exited with code 3 after train had returned" in outcome.cause


def test_a_process_that_cannot_be_killed_is_named_and_left_behind():
    cluster = trained(2)
    cluster.reap = lambda *_: None  # stuck in the kernel
    cluster.do("signal a TERM")
    cluster.do("advance 60")
    outcome = state_of(cluster).ending.outcome
    assert state_of(cluster).phase is Phase.CLOSED
    assert outcome.exit_code == 143  # what it was about; Leave carries what became of it
    assert any("pid 101" in line and "could not be ended" in line for line in cluster.lines)


def test_without_respawn_those_left_go_on():
    cluster = trained(2, respawn="no")
    cluster.do("die a.1 signal=9")
    cluster.do("formed")
    cluster.do("advance 60")
    assert len(state_of(cluster).locals) == 1
    assert state_of(cluster).phase is Phase.FORMED
    assert state_of(cluster).own_member().slots == 1


def test_without_respawn_the_last_death_ends_the_run():
    cluster = trained(1, respawn="no")
    cluster.do("die a.0 signal=9")
    outcome = state_of(cluster).ending.outcome
    assert outcome.exit_code == 5
    assert "was killed by signal 9" in outcome.cause


def test_a_spare_waits_outside_and_takes_a_dead_workers_place():
    cluster = Cluster(slots="2", spares="1")
    cluster.do("start a")
    for slot in range(3):
        cluster.do(f"ready a.{slot}")
    assert len(cluster.store.world.workers) == 2
    cluster.do("formed")
    cluster.do("progress step=2")
    cluster.do("die a.0 signal=9")
    cluster.do("formed")
    cluster.do("advance 1")
    slots = {worker.slot for worker in cluster.store.world.workers}
    assert slots == {1, 2}


def test_the_picture_of_the_states_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "draw_states.py", "--check"], check=False
    )
    assert done.returncode == 0, "run scripts/draw_states.py"
