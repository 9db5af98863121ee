"""Random histories of a small cluster: what never happens, and what happens in the end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.membership.machine import Phase
from elastic.membership.messages import Mode
from tests.membership_cluster import Cluster

AGENTS = ("a", "b")
SLOTS = (0, 1)
ACTIONS = (
    *("die", "ready", "formed", "progress", "advance", "freeze"),  # processes
    *("hold", "release", "cut", "mend", "lapse", "partition"),  # the store
)


class Watched(Cluster):
    """A cluster that checks each World on its way into the store."""

    dropped: frozenset[str] = frozenset()
    """Workers that some World has left out."""

    def wrote(self, name, member, write):
        before = self.store.world
        super().wrote(name, member, write)
        world = self.store.world
        if world is not before:
            last = 0 if before is None else before.generation
            assert world.generation == last + 1, "generations are a chain"
            assert name in self.store.members, "only a member proposes"
            now = {worker.worker_id for worker in world.workers}
            assert not now & self.dropped, "who was left out never comes back"
            if before is not None:
                self.dropped |= {worker.worker_id for worker in before.workers} - now
            if world.mode is Mode.BOUNDARY:
                assert set(before.workers) <= set(world.workers), "nobody is dropped at a boundary"


def living(cluster: Cluster) -> dict[str, str]:
    return {
        worker_id: name
        for name, agent in cluster.agents.items()
        if not agent.gone
        for worker_id in agent.pids
    }


def act(cluster: Cluster, action: str, number: int) -> None:
    alive = sorted(living(cluster))
    if action in ("hold", "release", "formed"):
        if action != "formed" or cluster.store.world is not None:
            cluster.do(action)
    elif action == "advance":
        cluster.do(f"advance {number % 7 / 4}")
    elif action == "progress":
        if cluster.world_workers():
            cluster.do(f"progress step={10 + number}")
    elif action == "partition":  # longer than anybody waits for it
        name = AGENTS[number % 2]
        for line in (f"cut {name}", f"lapse {name}", "advance 6"):
            cluster.do(line)
        act(cluster, "formed", number)
        cluster.do(f"mend {name}")
    elif action in ("lapse", "cut", "mend"):
        cluster.do(f"{action} {AGENTS[number % 2]}")
    elif alive:
        worker = cluster.alias[alive[number % len(alive)]]
        if action == "die":
            cluster.do(f"die {worker} signal=9")
        else:
            cluster.do(f"{action} {worker}")


@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 60)), max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_after_any_history_everybody_trains_again(trained, history):
    cluster = Watched(nodes="1:2", slots="2", max_failures="1000", hang_timeout_s="1")
    for name in AGENTS:
        cluster.do(f"start {name}")
    if trained:
        cluster.do("ready a.0 a.1 b.0 b.1")
        cluster.do("formed")
        cluster.do("progress step=1")
    for i, (action, number) in enumerate(history):
        act(cluster, action, number + i)
    for name in AGENTS:
        cluster.do(f"mend {name}")
    cluster.do("release")
    ended = {name for name, agent in cluster.agents.items() if agent.gone}
    if ended:  # ten deaths in a row without a step end a job, with their cause
        for name in ended:
            assert cluster.agents[name].state.ending.outcome.exit_code == 5
        return
    # Now nothing fails any more: in bounded time everyone is in one World that has formed.
    for round_ in range(40):
        cluster.do("advance 1.0")
        for worker_id in sorted(living(cluster)):
            cluster.do(f"ready {cluster.alias[worker_id]}")
        if cluster.store.world is not None:
            cluster.do("formed")
            cluster.do(f"progress step={200 + round_}")
    for agent in cluster.agents.values():
        assert agent.state.phase is Phase.FORMED, agent.decision.reason
        assert agent.state.world == cluster.store.world
    inside = {worker.worker_id for worker in cluster.store.world.workers}
    assert len(inside) == len(AGENTS) * len(SLOTS)
    assert inside == living(cluster).keys()
