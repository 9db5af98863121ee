"""Which worker holds up the others: what progress pages say, compared.

A worker renews its page whenever its main thread gets anywhere: at each phase, each micro-batch,
and several times a second while it waits in a collective. One that does not is silent. A silent
worker is at fault only if another one of the same World waits for it meanwhile; who waits is never
at fault, and if all are silent (a paused host, a store that serves all) nobody is.

How long a silence may be is learned from the steps, or set. First steps fill caches; compiling,
evaluations, saves and code between steps are slow and legal: those have a limit of their own.

Agents see pages of their own workers only. An agent whose workers all wait for too long says so in
its record, and that counts as somebody who waits on all other nodes. When all nodes say so, no
worker is to blame but what lies between them, and the World forms anew with the same workers; when
that does not help, the run ends and says so.
Silence is counted in looks of the agent, so that a pause of the agent itself accuses nobody.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.errors import ExitCode
from elastic.membership import ending
from elastic.membership.commands import Outcome
from elastic.membership.state import Broken, Local, State, Turn

if TYPE_CHECKING:
    from elastic.membership import commands as c

LOOK_CREDIT_S = 0.5
"""The most silence that one look can add."""
FRESH_S = 1.5
"""A page renewed within this time shows a worker that is alive and waits."""
WARM_STEPS = 3
"""Steps that a worker has to complete before its silence is measured by the time of a step."""
STEPS = 10
"""Learned limit, in steps."""
FLOOR_S = 60.0
"""Learned limit at least: a stalled disk is no death."""
SET_STEPS = 3
"""A limit that is set is at least so many steps."""
MAX_REFORMS = 2
"""New groups of the same workers, for nothing, that end a run in which all wait."""
STALL_FLOOR_S = 1.0
COLLECTIVE = frozenset({"exchange", "agree", "gather"})
WAITS = COLLECTIVE | {"finished"}
STEPPING = COLLECTIVE | {"compute", "apply"}
JUDGED = STEPPING | {"compile", "between", "evaluate", "save"}


def observe(turn: Turn, local: Local, reading: c.Reading) -> None:
    """Take a new reading of a worker's page into account."""
    last = local.reading
    moved = last is None or reading.at_s > last.at_s
    look_s = min(max(turn.now_s - local.seen_at_s, 0.0), LOOK_CREDIT_S)
    same = last is not None and (last.generation, last.step, last.phase) == (
        reading.generation,
        reading.step,
        reading.phase,
    )
    turn.put(
        local,
        reading=reading,
        seen_at_s=turn.now_s,
        silent_s=0.0 if moved else local.silent_s + look_s,
        place_s=local.place_s + look_s if same else 0.0,
    )


def judge(turn: Turn) -> None:
    """Kill who holds up the others; say to other nodes when ours wait for too long."""
    state = turn.state
    silent = [local for local in state.in_world() if _is_silent(state, local)]
    for local in silent:
        if _somebody_waits(state, local):
            assert local.reading is not None
            evidence = (
                f"no progress for {local.silent_s:.1f} s in phase {local.reading.phase} of step "
                f"{local.reading.step} while others wait"
            )
            turn.note(
                "worker.suspected", worker_id=local.worker_id, pid=local.pid, evidence=evidence
            )
            turn.kill(local, f"made {evidence} (pid {local.pid})", stack=True)
    waits = not silent and _all_wait(turn.state, times=1)
    world = turn.state.world
    tell = waits and world is not None and len(world.nodes) > 1
    turn.set(stalled=world.generation if tell and world is not None else 0)
    if waits and _nobody_at_fault(turn.state) and turn.state.broken is None:
        _form_again(turn)


def _form_again(turn: Turn) -> None:
    """Have the same workers form anew; give up when that has not helped."""
    if turn.state.reforms < MAX_REFORMS:
        turn.set(broken=Broken(since_s=turn.now_s, error="all workers wait and nothing arrives"))
        return
    places = ", ".join(
        f"{local.worker_id} in {local.reading.phase} of step {local.reading.step}"
        for local in turn.state.in_world()
        if local.reading is not None
    )
    cause = (
        f"all workers wait for each other and nothing arrives, also after {MAX_REFORMS} new groups "
        f"({places}): a link between them is cut, or train took different ways on them, such as "
        "ctx.evaluate() or ctx.save().wait() on some workers only"
    )
    ending.end(turn, Outcome(exit_code=ExitCode.INFRASTRUCTURE, cause=cause))


def limit_s(state: State, local: Local) -> float:
    """Return how long this worker may be silent where it is."""
    rules, step_s = state.rules, state.step_time_s or 0.0
    reading = local.reading
    if reading is None or reading.phase not in STEPPING or reading.done < WARM_STEPS:
        return max(rules.slow_timeout_s, rules.hang_timeout_s or 0.0)
    if rules.hang_timeout_s is not None:
        return max(rules.hang_timeout_s, SET_STEPS * step_s)
    return max(FLOOR_S, STEPS * step_s)


def _is_silent(state: State, local: Local) -> bool:
    world, reading = state.world, local.reading
    return (
        world is not None
        and reading is not None
        and reading.generation == world.generation
        and reading.phase in JUDGED
        and local.stopped_at_s is None  # judged by that
        and local.silent_s >= limit_s(state, local)
    )


def _waits(state: State, local: Local) -> bool:
    """Return whether a worker is alive in a collective of the World in force, or at the end."""
    world, reading = state.world, local.reading
    return (
        world is not None
        and reading is not None
        and reading.generation == world.generation
        and reading.phase in WAITS
        and local.silent_s < FRESH_S
    )


def _somebody_waits(state: State, suspect: Local) -> bool:
    world = state.world
    assert world is not None
    here = any(
        _waits(state, other) for other in state.in_world() if other.worker_id != suspect.worker_id
    )
    return here or any(
        member.stalled == world.generation
        for node, member in state.members().items()
        if node != state.node
    )


def _all_wait(state: State, *, times: float) -> bool:
    """Return whether all workers of this node in the World wait, and have for so many limits."""
    inside = state.in_world()
    return bool(inside) and all(
        _waits(state, local)
        and local.place_s >= times * max(STALL_FLOOR_S, limit_s(state, local) / 2)
        for local in inside
    )


def _nobody_at_fault(state: State) -> bool:
    """Return whether all nodes of the World have waited so long that no worker can be it."""
    world = state.world
    if world is None or len(world.workers) == 1:
        return False
    training = all(
        local.reading is not None and local.reading.phase in COLLECTIVE
        for local in state.in_world()
    )
    members = state.members()
    others = all(
        node in members and members[node].stalled == world.generation
        for node in world.nodes
        if node != state.node
    )
    return training and others and _all_wait(state, times=4)
