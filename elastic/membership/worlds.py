"""The machine's dealings with the store: which one write is due, and what a World in force means.

At most one write is under way at a time, so that the order of this agent's changes is the order in
which it decided them. A World and the own record that justifies it travel in one transaction. A
World is obeyed as soon as the transaction is known to have succeeded; the snapshot that shows it
comes later and brings the revision that the next proposal needs.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from elastic.errors import ExitCode
from elastic.membership import commands as c
from elastic.membership import ending
from elastic.membership.choose_world import (
    Choice,
    Proposal,
    View,
    Waiting,
    choose_world,
    gathered,
    joiners_of,
)
from elastic.membership.messages import Mode, World
from elastic.membership.state import Session, State, Turn, Write, WriteKind

BROKEN_PATIENCE_S = 0.5
"""How long a broken collective waits for a death that explains it, on one node."""
QUIET_S = 1.0
"""Without a newer agreement for that long (or two steps), a missing node counts as lost."""


def coordinate(turn: Turn) -> Choice:
    """Start the write that is due, if any; return what is thought about the next World."""
    _keep_times(turn)
    choice = choose(turn.state, turn.now_s)
    if isinstance(choice, Waiting) and choice.until_s is not None:
        turn.wake(choice.until_s)
    _wake_for_lost(turn)
    _below_minimum(turn, choice)
    _undecided(turn, choice)
    state = turn.state
    if state.ending is not None or not _may_write(turn):
        return choice
    own = state.members()[state.node]
    if isinstance(choice, Proposal) and _may_propose(state, turn.now_s):
        if state.world is not None and state.reshapes >= state.rules.max_reshapes:
            cause = f"the World has changed {state.reshapes} times, and max_reshapes allows no more"
            ending.end(turn, c.Outcome(exit_code=ExitCode.USER_CODE, cause=cause))
        elif state.world_revision is not None:
            own = state.own_member(choice.world)
            write = Write(
                kind=WriteKind.WORLD,
                after_revision=state.world_revision,
                world=choice.world,
                member=own,
            )
            turn.set(write=write)
            turn.do(
                c.WriteWorld(world=choice.world, after_revision=state.world_revision, member=own)
            )
    elif own != state.written:
        turn.set(write=Write(kind=WriteKind.MEMBER, member=own))
        turn.do(c.WriteMember(member=own))
    elif _must_pass_on_stop(state):
        turn.set(write=Write(kind=WriteKind.STOP))
        turn.do(c.WriteStop())
    return choice


def choose(state: State, now_s: float) -> Choice:
    """Return what should follow the World in force, as this agent sees it."""
    if state.snapshot is None or not state.entered:
        return Waiting(why="the coordination store has not answered yet")
    view = View(
        now_s=now_s,
        formed=formed_here(state),
        closing=state.closing,
        lost_nodes=lost_nodes(state, now_s),
        broken=_broken(state, now_s),
        gathered_at_s=state.gathered_at_s,
        joiners_at_s=state.joiners_at_s,
        deaths=state.deaths,
    )
    return choose_world(state.world, state.members(), view=view, rules=state.rules.world)


def write_result(turn: Turn, outcome: c.Outcome) -> None:
    """Write how the job ended, as soon as the store can be asked."""
    if not _may_write(turn):
        return
    state = turn.state
    revision = 0 if state.world is None else state.world_revision
    if revision is None:
        return
    turn.set(write=Write(kind=WriteKind.RESULT, after_revision=revision))
    result = {
        "exit_code": outcome.exit_code,
        "cause": outcome.cause,
        "step": outcome.step,
        "generation": outcome.generation,
        "worker": outcome.worker,
        "node": state.node,
        "members": sorted(member.incarnation for member in state.members().values()),
    }
    turn.do(c.WriteResult(result=result, world_revision=revision))


def adopt(turn: Turn, world: World, revision: int | None) -> None:
    """Obey a World that is in force: tell it to its workers here, end those it has left out.

    Args:
        revision: of its record; None when the snapshot that shows it has not come yet.
    """
    state = turn.state
    first = state.world is None and world.generation == state.rules.world.first_generation
    inside = {worker.worker_id for worker in world.workers}
    turn.set(
        world=world,
        world_revision=revision,
        reshapes=state.reshapes + (state.world is not None),
        reforms=state.reforms + (state.world is not None and state.world.workers == world.workers),
        broken=None,
        joiners_at_s=None,
        gathered_at_s=None,
        deaths={who: why for who, why in state.deaths.items() if who in inside},
    )
    keep_missing(turn)
    if not state.entered:
        return  # left behind by an earlier attempt, or about to be joined: no news
    turn.note(
        "generation.formed",
        generation=world.generation,
        workers=[worker.worker_id for worker in world.workers],
        mode=world.mode.value,
        reason=world.reason,
        stores=list(world.stores),
    )
    told = []
    for local in turn.state.living():
        if local.worker_id in inside:
            turn.put(
                local,
                told=world.generation,
                told_at_s=turn.now_s,
                joined=local.joined or world.generation,
            )
            told.append(local.worker_id)
        elif local.told:
            turn.kill(local, f"is not in generation {world.generation}", wanted=True)
    if told:
        turn.do(c.TellWorld(world=world, worker_ids=tuple(told), first=first))


def keep_missing(turn: Turn) -> None:
    """Keep since when which nodes of the World have no record."""
    state = turn.state
    if state.world is None or state.snapshot is None:
        turn.set(missing_at_s={})
        return
    turn.set(
        missing_at_s={
            node: state.missing_at_s.get(node, turn.now_s)
            for node in state.world.nodes
            if node not in state.snapshot.members and node != state.node
        }
    )


def formed_here(state: State) -> bool:
    """Return whether the World in force has formed, as far as the workers of this node tell."""
    world = state.world
    return world is not None and all(each.formed >= world.generation for each in state.in_world())


def lost_nodes(state: State, now_s: float) -> frozenset[str]:
    """Return the nodes of the World without a record that count as dead."""
    return frozenset(node for node in state.missing_at_s if now_s >= _lost_at_s(state, node))


def _lost_at_s(state: State, node: str) -> float:
    """Return from when on a missing node counts as lost, if no further agreement completes.

    An agreement proves that all members of the World lived, whatever the leases say. Who has no
    worker in the World sees no agreements, and waits for one lease more. So does who goes over at
    a boundary: agreements of the World before prove nothing about a node that is new in this one.
    """
    missing_at_s = state.missing_at_s[node]
    world = state.world
    blind = not state.in_world() or state.agreed_at_s is None
    if world is not None and world.mode is Mode.BOUNDARY:
        blind |= state.agreed_in < world.generation
    if blind or state.agreed_at_s is None:
        return missing_at_s + state.rules.lease_ttl_s
    quiet_s = max(QUIET_S, 2 * (state.step_time_s or 0.0))
    return max(missing_at_s, state.agreed_at_s + quiet_s)


def _wake_for_lost(turn: Turn) -> None:
    for node in turn.state.missing_at_s:
        at_s = _lost_at_s(turn.state, node)
        if at_s > turn.now_s:
            turn.wake(at_s)
    broken = turn.state.broken
    if broken is not None:
        at_s = broken.since_s + _patience_s(turn.state)
        if at_s > turn.now_s:
            turn.wake(at_s)


def _broken(state: State, now_s: float) -> str:
    """Return why the same workers have to form again, "" if they need not."""
    broken = state.broken
    if broken is None or now_s < broken.since_s + _patience_s(state):
        return ""
    return f"a collective failed although all workers live ({broken.error[:120]})"


def _patience_s(state: State) -> float:
    """Return how long to wait for the death that explains a broken collective."""
    nodes = () if state.world is None else state.world.nodes
    alone = set(nodes) <= {state.node}
    patience_s = BROKEN_PATIENCE_S if alone else state.rules.lease_ttl_s + QUIET_S
    return float(patience_s * 2 ** min(state.reforms, 6))


def _keep_times(turn: Turn) -> None:
    """Keep since when a first World could be formed, and since when somebody waits to join."""
    state = turn.state
    if not state.entered:
        return
    members, rules = state.members(), state.rules.world
    beginning = not state.survivors(lost_nodes(state, turn.now_s))
    can_begin = beginning and gathered(state.world, members, rules)
    if can_begin != (state.gathered_at_s is not None):
        turn.set(gathered_at_s=turn.now_s if can_begin else None)
    waiting = state.world is not None and bool(joiners_of(state.world, members, rules))
    if waiting != (state.joiners_at_s is not None):
        turn.set(joiners_at_s=turn.now_s if waiting else None)


def _below_minimum(turn: Turn, choice: Choice) -> None:
    """End the run when there have been too few nodes for too long."""
    state = turn.state
    if not (isinstance(choice, Waiting) and choice.below_minimum):
        turn.set(below_at_s=None)
        return
    since_s = turn.now_s if state.below_at_s is None else state.below_at_s
    until_s = since_s + state.rules.below_min_timeout_s
    turn.set(below_at_s=since_s)
    turn.wake(until_s)
    if turn.now_s >= until_s and state.ending is None:
        cause = f"{choice.why} for {state.rules.below_min_timeout_s:g} s"
        ending.end(turn, c.Outcome(exit_code=ExitCode.BELOW_MINIMUM, cause=cause))


def _undecided(turn: Turn, choice: Choice) -> None:
    """End the run when a World is due and the store has been away for too long."""
    state = turn.state
    if not isinstance(choice, Proposal) or state.session is Session.LIVE:
        turn.set(undecided_at_s=None)
        return
    since_s = turn.now_s if state.undecided_at_s is None else state.undecided_at_s
    until_s = since_s + state.rules.below_min_timeout_s
    turn.set(undecided_at_s=since_s)
    turn.wake(until_s)
    if turn.now_s >= until_s and state.ending is None:
        cause = (
            f"the coordination store has been away for {state.rules.below_min_timeout_s:g} s, "
            f"and a decision is due: {choice.world.reason}"
        )
        ending.end(turn, c.Outcome(exit_code=ExitCode.INFRASTRUCTURE, cause=cause))


def _may_write(turn: Turn) -> bool:
    state = turn.state
    if state.session is not Session.LIVE or state.write is not None:
        return False
    if turn.now_s < state.write_at_s:
        turn.wake(state.write_at_s)
        return False
    return True


def _may_propose(state: State, now_s: float) -> bool:
    """Return whether it is for this node to propose: it is part of the World, or nobody is."""
    world = state.world
    return (
        world is None or state.node in world.nodes or not state.survivors(lost_nodes(state, now_s))
    )


def _must_pass_on_stop(state: State) -> bool:
    """Return whether other agents have yet to hear that the job is to end."""
    stop = state.stop
    return stop is not None and stop.job and not stop.written and len(state.members()) > 1
