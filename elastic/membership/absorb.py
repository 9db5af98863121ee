"""From events to facts: what each event changes in the state, before anything is decided.

One function per event, reached through `absorb`. They note what happened (also in the event log)
and ask for nothing, save what follows without a decision: a World in force is passed on to the
workers at once. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from elastic.errors import ExitCode
from elastic.membership import commands as c
from elastic.membership import ending, failures, hangs, worlds
from elastic.membership.state import Broken, Helper, Life, Local, Session, Turn, WriteKind

if TYPE_CHECKING:
    from elastic.membership.messages import Member, Snapshot

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 2.0
MAX_FORK_SERVER_TRIES = 5
MAX_EARLY_DEATHS = 8
EARLY_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
LINGER_S = 2.0
"""How long a worker that reported its failure may take to leave by itself."""


def absorb(turn: Turn, event: c.Event) -> None:  # noqa: C901 - one line per event
    """Change the state by what has happened."""
    match event:
        case c.ForkServerUp():
            turn.set(fork_server=Helper.UP, fork_tries=0)
        case c.ForkServerDown():
            _fork_server_down(turn, event)
        case c.SavesSettled():
            ending.saves_settled(turn, event.error)
        case c.SaveFailed():
            _save_failed(turn, event)
        case c.HelperBroken():
            ending.end(turn, c.Outcome(exit_code=event.exit_code, cause=event.cause))
        case c.SessionOpened():
            _session_opened(turn)
        case c.SessionRefused():
            # Once inside, a refusal means that somebody else has taken this node's place.
            code = ExitCode.FENCED if turn.state.entered else event.exit_code
            outcome = c.Outcome(exit_code=code, cause=event.cause)
            ending.end(turn, outcome, local_only=True)
        case c.SessionLost():
            _session_lost(turn, event)
        case c.AttemptEntered():
            _attempt_entered(turn, event)
        case c.SnapshotSeen():
            _snapshot(turn, event.snapshot)
        case c.WriteDone():
            _write_done(turn, accepted=event.accepted)
        case c.WriteFailed():
            pause_s = _backoff(turn.state.write_tries)
            turn.set(
                write=None,
                write_tries=turn.state.write_tries + 1,
                write_at_s=turn.now_s + pause_s,
            )
        case c.StopAsked():
            ending.stop_asked(turn, event)
        case c.SaveAsked():
            ids = tuple(each.worker_id for each in turn.state.in_world())
            turn.note("checkpoint.requested", reason="an operator asked for it")
            turn.do(c.Tell(word=c.Word.SAVE, worker_ids=ids))
        case c.ProgressSeen():
            for reading in event.readings:
                _progress(turn, reading)
        case c.Woke():
            pass
        case _:
            _worker(turn, event)


def _worker(turn: Turn, event: c.WorkerEvent) -> None:  # noqa: C901 - one line per event
    """Take in what concerns one worker; an unknown one has been forgotten on purpose."""
    local = turn.state.local(event.worker_id)
    if local is None:
        return
    match event:
        case c.WorkerStarted():
            turn.put(local, pid=event.pid)
            turn.note(
                "worker.started",
                worker_id=local.worker_id,
                slot=local.slot,
                pid=event.pid,
                spare=local.slot >= turn.state.rules.slots,
            )
        case c.WorkerStartFailed():
            _start_failed(turn, local, event.reason)
        case c.WorkerReady():
            if local.life is Life.STARTING:
                turn.put(local, life=Life.READY)
            turn.note("worker.ready", worker_id=local.worker_id, layout=event.layout)
        case c.WorkerFormed():
            _formed(turn, local, event)
        case c.GroupBroke():
            world = turn.state.world
            if world and event.generation == world.generation and turn.state.broken is None:
                turn.set(broken=Broken(since_s=turn.now_s, error=event.error))
        case c.WorkerFailed():
            _failed(turn, local, event)
        case c.WorkerFinished():
            turn.put(local, finished=event)
        case c.WorkerDying():
            if local.life is not Life.DYING:
                turn.doom(local, event.evidence)
        case c.WorkerReaped():
            _reaped(turn, local, event)
        case c.WorkerStopped():
            turn.put(local, stopped_at_s=turn.now_s)
            turn.note(
                "worker.suspected",
                worker_id=local.worker_id,
                pid=local.pid,
                evidence="its process is stopped (state T)",
            )
        case c.WorkerContinued():
            turn.put(local, stopped_at_s=None)
        case _:
            assert_never(event)


# -- helpers of the agent -------------------------------------------------------------------------


def _fork_server_down(turn: Turn, event: c.ForkServerDown) -> None:
    tries = turn.state.fork_tries + 1
    turn.set(fork_server=Helper.DOWN, fork_tries=tries, fork_at_s=turn.now_s + _backoff(tries - 1))
    if tries >= MAX_FORK_SERVER_TRIES:
        ending.end(
            turn,
            c.Outcome(
                exit_code=ExitCode.INFRASTRUCTURE,
                cause=f"the fork server cannot be kept running: {event.reason}",
            ),
        )


def _save_failed(turn: Turn, event: c.SaveFailed) -> None:
    if turn.state.rules.fail_on_save_error:
        cause = f"the checkpoint of step {event.step} failed: {event.error}"
        ending.end(turn, c.Outcome(exit_code=ExitCode.STORAGE, cause=cause, step=event.step))


# -- coordination ---------------------------------------------------------------------------------


def _session_opened(turn: Turn) -> None:
    state = turn.state
    turn.set(
        session=Session.LIVE if state.entered else Session.OPEN,
        session_tries=0,
        written=state.registering,
        registering=None,
    )


def _session_lost(turn: Turn, event: c.SessionLost) -> None:
    state = turn.state
    if state.session is not Session.LOST and state.session_tries == 0:
        turn.note("coord.lost", reason=event.reason)
    # A lost session is opened again at once; an attempt that failed is repeated more slowly.
    pause_s = _backoff(state.session_tries) if state.session_tries else 0.0
    turn.set(
        session=Session.LOST,
        session_tries=state.session_tries + 1,
        session_at_s=turn.now_s + pause_s,
        written=None,
        registering=None,
    )


def _attempt_entered(turn: Turn, event: c.AttemptEntered) -> None:
    if event.differences:
        ending.end(
            turn,
            c.Outcome(
                exit_code=ExitCode.MISCONFIGURED,
                cause="this node was told other settings than the job has: "
                + "; ".join(event.differences),
            ),
            local_only=True,
        )
        return
    session = Session.LIVE if turn.state.session is Session.OPEN else turn.state.session
    turn.set(entered=True, session=session, write=None, write_tries=0)


def _snapshot(turn: Turn, snapshot: Snapshot) -> None:
    state = turn.state
    before = {} if state.snapshot is None else state.snapshot.members
    _note_members(turn, before, snapshot.members)
    turn.set(snapshot=snapshot)
    theirs, ours = snapshot.world, state.world
    if theirs is not None and (ours is None or theirs.generation > ours.generation):
        worlds.adopt(turn, theirs, snapshot.world_revision)
    elif theirs is None or ours is None or theirs == ours:
        turn.set(world_revision=snapshot.world_revision)
    worlds.keep_missing(turn)
    if not turn.state.entered:
        return
    if snapshot.result is not None and not ending.is_stale(snapshot):
        ending.ended_elsewhere(turn, snapshot.result)
    if snapshot.stop:
        ending.stop_asked(
            turn,
            c.StopAsked(scope=c.Scope.JOB, cause="the job was asked to stop", signal=15),
            written=True,
        )


def _write_done(turn: Turn, *, accepted: bool) -> None:
    state = turn.state
    write = state.write
    if write is None:
        return
    turn.set(write=None, write_tries=0)
    if write.member is not None and accepted:
        turn.set(written=write.member)
    match write.kind:
        case WriteKind.WORLD if accepted and write.world is not None:
            if state.world is None or write.world.generation > state.world.generation:
                worlds.adopt(turn, write.world, None)
        case WriteKind.WORLD | WriteKind.RESULT if not accepted:
            if write.after_revision == state.world_revision:
                turn.set(world_revision=None)  # there is a newer one: the next snapshot has it
            if write.kind is WriteKind.RESULT:
                ending.result_refused(turn)
        case WriteKind.RESULT:
            ending.result_written(turn)
        case WriteKind.STOP if turn.state.stop is not None:
            turn.set(stop=replace(turn.state.stop, written=True))
        case _:
            pass


def _note_members(turn: Turn, before: Mapping[str, Member], now: Mapping[str, Member]) -> None:
    for node, member in now.items():
        known = before.get(node)
        if known is None or known.incarnation != member.incarnation:
            turn.note(
                "member.joined",
                member=node,
                address=member.address,
                slots=member.slots,
                incarnation=member.incarnation,
            )
    for node in before.keys() - now.keys():
        turn.note("member.expired", member=node, reason="its record is gone")


def _backoff(tries: int) -> float:
    """Return the pause before the next try."""
    return float(min(LAST_RETRY_S, FIRST_RETRY_S * 2**tries))


# -- workers --------------------------------------------------------------------------------------


def _formed(turn: Turn, local: Local, event: c.WorkerFormed) -> None:
    finished = local.finished
    if finished is not None and event.generation > finished.generation:
        finished = None  # it trains again, from a state that was not the last
    turn.put(local, formed=max(local.formed, event.generation), finished=finished)
    world = turn.state.world
    if world is not None and event.generation == world.generation:
        turn.set(ledger=failures.formed(turn.state.ledger), broken=None, reforms=0)
        slot = next(each for each in turn.state.slots if each.slot == local.slot)
        turn.put_slot(slot, early_deaths=0)


def _progress(turn: Turn, reading: c.Reading) -> None:
    local = turn.state.local(reading.worker_id)
    if local is None:
        return
    last = local.reading
    hangs.observe(turn, local, reading)
    state = turn.state
    if last is not None and reading.step > last.step and reading.at_s > last.at_s:
        if reading.generation == last.generation and last.step > 0:
            turn.set(step_time_s=(reading.at_s - last.at_s) / (reading.step - last.step))
        turn.set(
            agreed_at_s=max(reading.at_s, state.agreed_at_s or reading.at_s),
            agreed_in=max(reading.generation, state.agreed_in),
        )
    if reading.committed > state.committed:
        turn.set(
            committed=reading.committed,
            ledger=failures.progressed(state.ledger, reading.committed),
        )


def _failed(turn: Turn, local: Local, event: c.WorkerFailed) -> None:
    """A report comes before the exit, and is acted on at once: the exit may take its time."""
    how = f"failed: {event.error}"
    local = turn.put(local, failure=event, kill_at_s=turn.now_s + LINGER_S)
    if local.life is not Life.DYING:
        local = turn.doom(local, how)
    if not local.wanted and not local.counted:
        _count(turn, local, how, by_signal=False)


def _reaped(turn: Turn, local: Local, event: c.WorkerReaped) -> None:
    how = how_it_ended(event)
    turn.note(
        "worker.exited",
        worker_id=local.worker_id,
        pid=local.pid,
        exit_code=event.exit_code,
        signal=event.signal,
        evidence=local.why or how,
        noticed_at_s=local.doomed_at_s,
    )
    if turn.state.ending is not None and local.finished is not None:
        ending.worker_left(turn, local, event)
    elif not local.wanted and not local.counted:
        said = local.why if local.kill_asked else how
        local = turn.doom(local, said)
        _count(turn, local, said, by_signal=event.signal is not None)
    _remove(turn, local)


def how_it_ended(event: c.WorkerReaped) -> str:
    """Return a worker's end as the rest of a sentence that begins with its id."""
    if event.signal is not None:
        how = f"was killed by signal {event.signal}"
    else:
        how = f"exited with code {event.exit_code} before the job was done"
    return f"{how} ({event.hint})" if event.hint else how


def _start_failed(turn: Turn, local: Local, reason: str) -> None:
    slot = next(each for each in turn.state.slots if each.slot == local.slot)
    _remove(turn, local)
    if slot.early_deaths + 1 >= MAX_EARLY_DEATHS and turn.state.fork_server is Helper.UP:
        ending.end(
            turn,
            c.Outcome(
                exit_code=ExitCode.INFRASTRUCTURE,
                cause=f"no worker can be started in slot {local.slot}: {reason}",
            ),
        )


def _remove(turn: Turn, local: Local) -> None:
    """Forget a process that is gone, and say when its slot may be used again."""
    state = turn.state
    turn.set(locals=tuple(each for each in state.locals if each.worker_id != local.worker_id))
    slot = next(each for each in state.slots if each.slot == local.slot)
    early = slot.early_deaths + 1 if local.formed == 0 and not local.wanted else 0
    pause_s = EARLY_PAUSES_S[min(early, len(EARLY_PAUSES_S)) - 1] if early else 0.0
    turn.put_slot(
        slot,
        early_deaths=early,
        start_at_s=turn.now_s + pause_s if state.rules.respawn else None,
    )


def _count(turn: Turn, local: Local, how: str, *, by_signal: bool) -> None:
    """Put a death into the ledger and ask it for a verdict."""
    state = turn.state
    reading, failure = local.reading, local.failure
    generation = max(local.formed, 0 if reading is None else reading.generation) or local.joined
    death = failures.Death(
        worker_id=local.worker_id,
        generation=generation,
        attempt=local.attempt,
        step=failure.step if failure else (0 if reading is None else reading.step),
        how=how,
        by_signal=by_signal,
        failure=failure,
    )
    turn.put(local, counted=True)
    verdict = failures.verdict(
        state.ledger,
        death,
        others_alive=_others_alive(turn, local, generation),
        max_failures=state.rules.max_failures,
    )
    turn.set(ledger=failures.count(state.ledger, death))
    if verdict is not None:
        ending.end(turn, verdict)


def _others_alive(turn: Turn, local: Local, generation: int) -> bool:
    """Return whether others could go on without this worker, or have yet to start as it did."""
    state = turn.state
    if generation:
        return bool(state.survivors())
    return any(
        each.life is not Life.DYING and each.attempt == local.attempt
        for each in state.locals
        if each.worker_id != local.worker_id
    ) or any(slot.attempts < local.attempt for slot in state.slots)
