"""Which World should follow: one pure function of the World in force and what members say.

Any agent may ask and propose; because the answer depends on records that all of them see, racing
proposals differ at most in what one agent has not heard yet, and the store lets only one of them
win. Rules, in the order in which they are asked:

1. No World yet, or no worker of it is left: begin with the ready workers of enough nodes, after a
   short wait for more (a World that no worker of the last one survives is a *takeover*: its
   workers start from the newest checkpoint).
2. A worker of the World is gone: the survivors go on, mode now. Joiners wait for their own World,
   because a survivor must not wait for them; those that are already in the World stay in it. With
   fewer nodes than the minimum nothing is proposed (the survivors pause, with their state),
   until ready joiners make up for the missing nodes.
3. A collective broke without a death: the same workers form again, mode now.
4. Ready workers outside the World: they join at a step boundary, once the World in force has
   completed its first agreement and a short window for further joiners has passed.

A node's missing record is no death by itself: the caller says which missing nodes count as lost
(`nodes_lost`: a completed agreement proves that all members are alive, so a lapsed lease is
evidence only if no agreement has completed since).

Not here yet: mutual reachability, covering every segment, hand-over of a leaving node's state.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.membership.messages import MAX_STORES, Member, Mode, WorkerRef, World

SHORT_WINDOW_S = 0.3
"""How long a complete set of workers waits for nodes that may or may not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldRules:
    """What the job's configuration says about Worlds.

    Args:
        max_workers: virtual ranks; more workers than that would have nothing to do.
        min_wait_s: how long a World waits for further members once it could be formed.
        first_generation: number of the job's first World; above all that its checkpoints name.
        max_reshapes: changes of the World before joiners are not taken in any more.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    max_workers: int | None = None
    min_wait_s: float = 1.0
    first_generation: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the asking agent knows beyond the records.

    Args:
        now_s: monotonic now.
        formed: the World in force has completed its first agreement, as far as is known here.
        closing: the job ends; nobody is taken in any more.
        lost_nodes: nodes without a record that count as dead.
        broken: why the World in force has to form again with the same workers; "" = it need not.
        gathered_at_s: since when enough nodes could form a first World.
        joiners_at_s: since when there is a ready worker outside the World.
        deaths: sentences about workers that died here, for the reason.
    """

    now_s: float
    formed: bool = True
    closing: bool = False
    lost_nodes: frozenset[str] = frozenset()
    broken: str = ""
    gathered_at_s: float | None = None
    joiners_at_s: float | None = None
    deaths: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """This World should be in force."""

    world: World


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Nothing to propose now.

    Args:
        why: one sentence for people; "" when all is as it should be.
        until_s: when to ask again without news; None = only after news.
        below_minimum: it is for want of nodes.
        settling: enough members are there, and the wait for more is running.
    """

    why: str = ""
    until_s: float | None = None
    below_minimum: bool = False
    settling: bool = False


Choice = Proposal | Waiting


def choose_world(
    world: World | None, members: Mapping[str, Member], *, view: View, rules: WorldRules
) -> Choice:
    """Return the World that should follow `world`, or why none should.

    Args:
        world: the World in force, None before the first.
        members: the records of all nodes; the asking agent puts in its own newest one.
    """
    survivors = [] if world is None else survivors_of(world, members, view.lost_nodes)
    if world is None or not survivors:
        return _begin(world, members, view, rules)
    if len(survivors) < len(world.workers):
        return _go_on(world, survivors, members, view, rules)
    silent = [node for node in world.nodes if node not in members]
    if silent:
        return Waiting(why=f"{_some(silent)} has no record in the store; not known to be lost")
    if view.broken:
        return _propose(world, world.workers, members, Mode.NOW, view.broken, rules)
    return _admit(world, members, view, rules)


def survivors_of(
    world: World, members: Mapping[str, Member], lost_nodes: frozenset[str] = frozenset()
) -> list[WorkerRef]:
    """Return the workers of the World that live, in rank order."""
    alive = {
        worker.worker_id
        for member in members.values()
        if not member.leaving
        for worker in member.workers
    }
    return [
        worker
        for worker in world.workers
        if worker.worker_id in alive
        or (worker.node not in members and worker.node not in lost_nodes)
    ]


def joiners_of(world: World, members: Mapping[str, Member], rules: WorldRules) -> list[WorkerRef]:
    """Return the ready workers outside the World that may be taken in, by node and slot."""
    inside = {worker.worker_id for worker in world.workers}
    room = len(world.workers) if rules.max_workers is None else rules.max_workers
    room -= len(world.workers)
    nodes = set(world.nodes)
    found: list[WorkerRef] = []
    # Nodes that are in the World come first: a new one must not take their respawned workers' room.
    for node in sorted(members, key=lambda name: (name not in nodes, name)):
        member = members[node]
        if member.leaving or (node not in nodes and len(nodes) >= rules.max_nodes):
            continue
        taken_slots = {worker.slot for worker in world.workers if worker.node == node}
        free = member.slots - len(taken_slots)
        ready = [w for w in ready_of(member) if w.worker_id not in inside]
        fit = [w for w in ready if w.slot not in taken_slots][: max(0, free)]
        found += fit
        if fit:
            nodes.add(node)
    return found if rules.max_workers is None else found[: max(0, room)]


def gathered(world: World | None, members: Mapping[str, Member], rules: WorldRules) -> bool:
    """Return whether enough nodes are ready to begin, apart from the wait for more."""
    return len(_candidates(world, members)) >= rules.min_nodes


def ready_of(member: Member) -> list[WorkerRef]:
    """Return a member's ready workers by slot."""
    ready = [
        WorkerRef(worker_id=worker.worker_id, node=member.node, slot=worker.slot)
        for worker in member.workers
        if worker.ready
    ]
    return sorted(ready, key=lambda worker: worker.slot)


# -- the four rules -------------------------------------------------------------------------------


def _begin(
    world: World | None, members: Mapping[str, Member], view: View, rules: WorldRules
) -> Choice:
    """Rule 1: form a World that nobody's state survives into."""
    nodes = _candidates(world, members)
    present = sorted(node for node, member in members.items() if not member.leaving)
    if view.closing:
        return Waiting(why="the job ends")
    if len(nodes) < rules.min_nodes:
        if len(present) < rules.min_nodes:
            return Waiting(
                why=f"{len(present)} of {rules.min_nodes} nodes are there",
                below_minimum=True,
            )
        slow = [node for node in present if node not in nodes]
        return Waiting(why=f"waiting for the workers of {_some(slow)} to be ready")
    complete = [node for node in nodes if len(ready_of(members[node])) >= members[node].slots]
    if len(complete) < rules.max_nodes:
        began_s = view.now_s if view.gathered_at_s is None else view.gathered_at_s
        until_s = began_s + rules.min_wait_s
        if view.now_s < until_s:
            return Waiting(
                why=f"{len(nodes)} of at most {rules.max_nodes} nodes are ready; "
                f"waiting {rules.min_wait_s:g} s for more",
                until_s=until_s,
                settling=True,
            )
    chosen = sorted(nodes, key=lambda node: (node not in complete, node))[: rules.max_nodes]
    workers = [
        worker
        for node in sorted(chosen)
        for worker in ready_of(members[node])[: members[node].slots]
    ]
    if rules.max_workers is not None:
        workers = workers[: rules.max_workers]
    if world is None:
        reason = (
            f"the first World: {_count(len(workers), 'worker')} on {_count(len(chosen), 'node')}"
        )
    else:
        reason = (
            f"no worker of generation {world.generation} is left; "
            f"{_count(len(workers), 'worker')} begin from the newest checkpoint"
        )
    return _propose(world, workers, members, Mode.NOW, reason, rules)


def _go_on(
    world: World,
    survivors: Sequence[WorkerRef],
    members: Mapping[str, Member],
    view: View,
    rules: WorldRules,
) -> Choice:
    """Rule 2: the survivors of the World go on without those that are gone."""
    alive = {worker.worker_id for worker in survivors}
    gone = [worker for worker in world.workers if worker.worker_id not in alive]
    reason = _why_gone(gone, members, view)
    workers = list(survivors)
    num_nodes = len({worker.node for worker in workers})
    if num_nodes < rules.min_nodes and not view.closing:
        workers += _joiners_after(world, survivors, members, rules)
        num_nodes = len({worker.node for worker in workers})
        if num_nodes < rules.min_nodes:
            return Waiting(
                why=f"paused with {num_nodes} of {rules.min_nodes} nodes: {reason}",
                below_minimum=True,
            )
    return _propose(world, workers, members, Mode.NOW, reason, rules)


def _admit(world: World, members: Mapping[str, Member], view: View, rules: WorldRules) -> Choice:
    """Rule 4: ready workers join at a step boundary."""
    joiners = joiners_of(world, members, rules)
    if not joiners:
        return Waiting()
    if view.closing:
        return Waiting(why="the job ends; nobody joins any more")
    if not view.formed:
        return Waiting(
            why=f"{_some([w.worker_id for w in joiners])} will join when generation "
            f"{world.generation} has formed"
        )
    window_s = _window_s(world, joiners, members, rules)
    since_s = view.now_s if view.joiners_at_s is None else view.joiners_at_s
    if view.now_s < since_s + window_s:
        return Waiting(
            why=f"{_some([w.worker_id for w in joiners])} will join; waiting for others",
            until_s=since_s + window_s,
        )
    reason = f"{_some([w.worker_id for w in joiners])} joined"
    workers = (*world.workers, *joiners)
    return _propose(world, workers, members, Mode.BOUNDARY, reason, rules)


# -- parts ----------------------------------------------------------------------------------------


def _candidates(world: World | None, members: Mapping[str, Member]) -> list[str]:
    """Return the nodes that could begin: all slots ready at first, any worker in a takeover."""
    found = []
    for node, member in sorted(members.items()):
        need = member.slots if world is None else 1
        if not member.leaving and need > 0 and len(ready_of(member)) >= need:
            found.append(node)
    return found


def _joiners_after(
    world: World,
    survivors: Sequence[WorkerRef],
    members: Mapping[str, Member],
    rules: WorldRules,
) -> list[WorkerRef]:
    """Return who may join the survivors: the dead workers' places are free for them."""
    rest = World(
        generation=world.generation,
        workers=tuple(survivors),
        stores=world.stores,
        mode=world.mode,
        reason=world.reason,
    )
    return joiners_of(rest, members, rules)


def _window_s(
    world: World, joiners: Sequence[WorkerRef], members: Mapping[str, Member], rules: WorldRules
) -> float:
    """Return how long to wait for further joiners, counted from the first one."""
    inside: dict[str, int] = {}
    for worker in (*world.workers, *joiners):
        inside[worker.node] = inside.get(worker.node, 0) + 1
    staying = {node: member for node, member in members.items() if not member.leaving}
    if any(inside.get(node, 0) < member.slots for node, member in staying.items()):
        return rules.min_wait_s
    if len(inside) < rules.max_nodes:
        return min(rules.min_wait_s, SHORT_WINDOW_S)
    return 0.0


def _propose(
    world: World | None,
    workers: Iterable[WorkerRef],
    members: Mapping[str, Member],
    mode: Mode,
    reason: str,
    rules: WorldRules,
) -> Proposal:
    chosen = tuple(workers)
    last = 0 if world is None else world.generation
    return Proposal(
        world=World(
            generation=max(last + 1, rules.first_generation),
            workers=chosen,
            stores=_stores(world, chosen, members),
            mode=mode,
            reason=reason,
        )
    )


def _stores(
    world: World | None, workers: Sequence[WorkerRef], members: Mapping[str, Member]
) -> tuple[str, ...]:
    """Return up to two agents' addresses: those that served before stay, others fill up."""
    nodes = dict.fromkeys(worker.node for worker in workers)
    addresses = [members[node].address for node in nodes if node in members]
    kept = [] if world is None else [each for each in world.stores if each in addresses]
    return tuple(dict.fromkeys([*kept, *addresses]))[:MAX_STORES]


def _why_gone(gone: Sequence[WorkerRef], members: Mapping[str, Member], view: View) -> str:
    parts: dict[str, None] = {}
    for worker in gone:
        member = members.get(worker.node)
        if member is None:
            parts[f"node {worker.node} is gone"] = None
        elif worker.worker_id in view.deaths:
            parts[f"{worker.worker_id} {view.deaths[worker.worker_id]}"] = None
        elif member.leaving:
            parts[f"node {worker.node} leaves"] = None
        else:
            parts[f"{worker.worker_id} died"] = None
    return "; ".join(parts)


def _some(names: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
