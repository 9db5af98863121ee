"""What becomes of this node's own processes: who is started, who counts as dead without dying.

A stopped worker is suspected at once and dead after the hang timeout (learned from the steps unless
it is set). A worker that does not react to a World that says "now" counts as dead too: the others
wait for it. Busy in a long step is no crime, so that limit grows with the step time, and nobody is
blamed who is forming, restoring or waiting for others.

A slot whose worker died gets a new one at once, unless it keeps dying before it completes an
agreement: then the pause grows. Workers that are silent while others wait: see hangs.py.
Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib

from elastic.errors import ExitCode
from elastic.membership import commands as c
from elastic.membership import ending, hangs
from elastic.membership.messages import Mode
from elastic.membership.state import (
    Helper,
    Life,
    Local,
    Session,
    State,
    Turn,
    Write,
    WriteKind,
)

HANG_FLOOR_S = 1.0
HANG_STEPS = 10
FORM_STEPS = 5
WAITING_PHASES = frozenset({"reform", "restore", "waiting", "finished", "starting"})


def supervise(turn: Turn) -> None:
    """Start and end helpers and workers as the state asks for."""
    keep_session(turn)
    _start_fork_server(turn)
    for local in turn.state.locals:
        if local.life is Life.DYING:
            _end_dying(turn, local)
        else:
            _judge(turn, local)
    hangs.judge(turn)
    _start_workers(turn)
    _nobody_left(turn)


def hang_timeout_s(state: State) -> float:
    """Return after how long a stopped worker counts as dead."""
    if state.rules.hang_timeout_s is not None:
        return state.rules.hang_timeout_s
    return max(HANG_FLOOR_S, HANG_STEPS * (state.step_time_s or 0.0))


def worker_id_of(state: State, slot: int, number: int) -> str:
    """Return a fresh worker id: the same for the same agent's n-th start, never another's."""
    seed = f"{state.node}/{state.incarnation}/{number}".encode()
    return f"{state.node}.{slot}-{hashlib.blake2b(seed, digest_size=3).hexdigest()}"


def keep_session(turn: Turn) -> None:
    """Register again after a loss, and settle the job's configuration after the first time."""
    state = turn.state
    if state.session is Session.LOST:
        if turn.now_s < state.session_at_s:
            turn.wake(state.session_at_s)
            return
        member = state.own_member()
        turn.set(session=Session.OPENING, registering=member)
        turn.do(c.OpenSession(member=member))
    if state.session is Session.OPEN and state.snapshot is not None and state.write is None:
        if turn.now_s < state.write_at_s:
            turn.wake(state.write_at_s)
            return
        _enter(turn)


def _enter(turn: Turn) -> None:
    """Settle what an earlier attempt of the job has left, and the configuration."""
    snapshot = turn.state.snapshot
    assert snapshot is not None
    alone = set(snapshot.members) <= {turn.state.node}
    turn.set(write=Write(kind=WriteKind.ATTEMPT))
    turn.do(
        c.EnterAttempt(
            clear=alone or ending.is_stale(snapshot), world_revision=snapshot.world_revision
        )
    )


def _start_fork_server(turn: Turn) -> None:
    state = turn.state
    if state.fork_server is not Helper.DOWN:
        return
    if turn.now_s < state.fork_at_s:
        turn.wake(state.fork_at_s)
        return
    turn.set(fork_server=Helper.STARTING)
    turn.do(c.StartForkServer())


def _start_workers(turn: Turn) -> None:
    state = turn.state
    if state.fork_server is not Helper.UP or not state.entered or state.closing:
        return
    taken = {local.slot for local in state.locals}
    for slot in state.slots:
        if slot.slot in taken or slot.start_at_s is None:
            continue
        if turn.now_s < slot.start_at_s:
            turn.wake(slot.start_at_s)
            continue
        number = turn.state.started + 1
        worker_id = worker_id_of(state, slot.slot, number)
        local = Local(worker_id=worker_id, slot=slot.slot, attempt=slot.attempts + 1)
        turn.set(started=number, locals=(*turn.state.locals, local))
        turn.put_slot(slot, attempts=local.attempt)
        turn.do(c.StartWorker(worker_id=worker_id, slot=slot.slot, first=state.world is None))


def _nobody_left(turn: Turn) -> None:
    """End the run when this node has no worker, will have none, and no other node is there."""
    state = turn.state
    if state.locals or any(slot.start_at_s is not None for slot in state.slots):
        return
    if len(state.members()) > 1 or state.ending is not None:
        return
    first = state.ledger.first
    cause = "no worker is left, and respawn is off"
    if first is not None:
        cause = f"{cause}: {first.cause}"
    outcome = c.Outcome(
        exit_code=ExitCode.USER_CODE, cause=cause, worker="" if first is None else first.worker_id
    )
    ending.end(turn, outcome)


def _end_dying(turn: Turn, local: Local) -> None:
    """Kill what said that it would leave and has not."""
    if local.kill_asked or local.kill_at_s is None:
        return
    if turn.now_s < local.kill_at_s:
        turn.wake(local.kill_at_s)
        return
    turn.kill(local, local.why)


def _judge(turn: Turn, local: Local) -> None:
    if local.stopped_at_s is not None:
        limit_s = hang_timeout_s(turn.state)
        if turn.now_s >= local.stopped_at_s + limit_s:
            turn.kill(local, f"was stopped for {limit_s:.1f} s (pid {local.pid})")
        else:
            turn.wake(local.stopped_at_s + limit_s)
        return
    since_s = _silent_since_s(turn.state, local)
    if since_s is None:
        return
    limit_s = max(turn.state.rules.form_timeout_s, FORM_STEPS * (turn.state.step_time_s or 0.0))
    if turn.now_s >= since_s + limit_s:
        phase = "unknown" if local.reading is None else local.reading.phase
        turn.kill(
            local,
            f"did not follow generation {local.told} within {limit_s:.0f} s "
            f"(pid {local.pid}, last seen in {phase})",
        )
    else:
        turn.wake(since_s + limit_s)


def _silent_since_s(state: State, local: Local) -> float | None:
    """Return since when a worker has not reacted to the World; None if it need not."""
    world = state.world
    if (
        world is None
        or world.mode is not Mode.NOW
        or local.told != world.generation
        or local.formed >= local.told
        or local.finished is not None
    ):
        return None
    reading = local.reading
    if reading is None:
        return local.told_at_s
    if reading.generation >= local.told or reading.phase in WAITING_PHASES:
        return None
    return max(local.told_at_s, reading.at_s)
