"""How a run ends on this node: asked to stop, finished, given up; and the order of the clean-up.

An end is decided once. In good order (train has returned everywhere, or workers have ended after an
agreed step): the result is written first, over the World's revision, then the workers are told to
leave. Otherwise they are killed at once. Then, both ways: saves under way are settled, every
worker is reaped, and the agent leaves. Every wait has a bound; what outlasts it is named.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic.errors import SIGNAL_BASE, ExitCode, ended_by
from elastic.membership import commands as c
from elastic.membership.messages import Snapshot
from elastic.membership.state import Ending, Life, Local, Stop, Turn

RESULT_PATIENCE_S = 5.0
"""How long an end waits for the store when no other node needs to know."""
KILL_LIMIT_S = 5.0
"""After SIGKILL a process is gone within milliseconds, or stuck in the kernel."""
SETTLE_MARGIN_S = 5.0
MAX_SIGNAL = 64


def end(turn: Turn, outcome: c.Outcome, *, orderly: bool = False, local_only: bool = False) -> None:
    """Begin the end, unless it has begun.

    Args:
        orderly: the workers have finished and wait to be told.
        local_only: this node leaves; the job's result is not for it to write.
    """
    state = turn.state
    if state.ending is not None:
        return
    alone = len(state.members()) <= 1
    patience_s = RESULT_PATIENCE_S
    if orderly and not alone:
        patience_s = state.rules.below_min_timeout_s
    generation = 0 if state.world is None else state.world.generation
    turn.set(
        ending=Ending(
            outcome=replace(
                outcome,
                generation=outcome.generation or generation,
                step=outcome.step or state.committed,
            ),
            since_s=turn.now_s,
            orderly=orderly,
            result_due=state.entered and not local_only,
            result_until_s=turn.now_s + patience_s,
        )
    )


def check_finished(turn: Turn) -> None:
    """Begin the end if train has returned in every worker of the World and ours is the main one."""
    state = turn.state
    world, survivors = state.world, state.survivors()
    if world is None or not survivors or survivors[0] != world.workers[0]:
        return  # the main rank has the value; if it is gone, the next World has another one
    members = state.members()
    for worker in survivors:
        local = state.local(worker.worker_id)
        if worker.node == state.node:
            if local is None or local.finished is None:
                return
        elif worker.node not in members or not members[worker.node].finished:
            return
    main = state.local(survivors[0].worker_id)
    if main is None or main.finished is None:
        return  # another node writes the result; it will be in a snapshot
    outcome = c.Outcome(
        exit_code=ExitCode.DONE,
        value=main.finished.value,
        step=main.finished.step,
        generation=world.generation,
    )
    if state.stop is not None:
        outcome = replace(outcome, exit_code=ended_by(state.stop.signal), cause=state.stop.cause)
    end(turn, outcome, orderly=True)


# -- asked to stop --------------------------------------------------------------------------------


def stop_asked(turn: Turn, event: c.StopAsked, *, written: bool = False) -> None:
    """Take in that somebody wants an end; the first one's reason stands."""
    state = turn.state
    outcome = c.Outcome(exit_code=ended_by(event.signal), cause=event.cause)
    if event.at_once:
        if state.ending is None:
            end(turn, outcome)
        _hurry(turn)
        return
    if state.ending is not None or state.stop is not None:
        return
    others = {worker.node for worker in state.survivors()} - {state.node}
    leaving = event.scope is c.Scope.NODE and bool(others)
    turn.set(
        stop=Stop(
            cause=event.cause,
            signal=event.signal,
            deadline_at_s=turn.now_s + state.rules.grace_s,
            job=not leaving,
            written=written,
        ),
        leaving=leaving,
    )
    turn.note("run.stopping", reason=event.cause)


def go_on_stopping(turn: Turn) -> None:
    """Tell the workers, and see that the end comes in time."""
    state = turn.state
    stop = state.stop
    if stop is None or state.ending is not None:
        return
    turn.wake(stop.deadline_at_s)
    outcome = c.Outcome(exit_code=ended_by(stop.signal), cause=stop.cause)
    mine = state.in_world()
    if turn.now_s >= stop.deadline_at_s:
        late = f"{stop.cause}; the workers had not ended within {state.rules.grace_s:g} s"
        end(turn, replace(outcome, cause=late), local_only=state.leaving)
    elif not mine and (state.leaving or not state.survivors()):
        end(turn, outcome, local_only=state.leaving)
    elif not state.leaving:
        untold = [each for each in mine if not each.stop_told]
        for each in untold:
            turn.put(each, stop_told=True)
        if untold:
            ids = tuple(each.worker_id for each in untold)
            turn.do(c.Tell(word=c.Word.STOP, worker_ids=ids))


def leave_at_once(turn: Turn) -> None:
    """Leave without a World that says so: the others are too few to make one."""
    stop = turn.state.stop
    if stop is not None:
        outcome = c.Outcome(exit_code=ended_by(stop.signal), cause=stop.cause)
        end(turn, outcome, local_only=True)


def _hurry(turn: Turn) -> None:
    """Leave out every wait but that for killed processes."""
    ending = turn.state.ending
    if ending is not None:
        turn.set(ending=replace(ending, orderly=False, result_due=False, told=False, settled=True))


# -- the result -----------------------------------------------------------------------------------


def result_written(turn: Turn) -> None:
    """Take in that our result stands."""
    if turn.state.ending is not None:
        turn.set(ending=replace(turn.state.ending, result_due=False))


def result_refused(turn: Turn) -> None:
    """Take in that the World changed before our result: somebody died, or was faster."""
    ending = turn.state.ending
    if ending is not None and ending.orderly:
        turn.set(ending=None)  # decided anew with the next snapshot


def ended_elsewhere(turn: Turn, result: Mapping[str, Any]) -> None:
    """Take in a result that stands in the store."""
    state = turn.state
    if result.get("node") == state.node or (state.ending and not state.ending.result_due):
        result_written(turn)
        return
    exit_code = int(result.get("exit_code", ExitCode.INFRASTRUCTURE))
    signalled = SIGNAL_BASE < exit_code <= SIGNAL_BASE + MAX_SIGNAL
    if state.ending is not None:
        result_written(turn)
        return
    end(
        turn,
        c.Outcome(
            exit_code=exit_code,
            cause=str(result.get("cause", "")),
            step=int(result.get("step", 0)),
            generation=int(result.get("generation", 0)),
            worker=str(result.get("worker", "")),
        ),
        orderly=exit_code == ExitCode.DONE or signalled,
        local_only=True,
    )


def is_stale(snapshot: Snapshot) -> bool:
    """Return whether a result was written by an attempt that no present member took part in."""
    if snapshot.result is None:
        return False
    present = {member.incarnation for member in snapshot.members.values()}
    return not present & set(snapshot.result.get("members", ()))


# -- the clean-up ---------------------------------------------------------------------------------


def worker_left(turn: Turn, local: Local, event: c.WorkerReaped) -> None:
    """Take in the end of a worker that had finished; its code still counts."""
    ending = turn.state.ending
    if ending is None or ending.outcome.exit_code != ExitCode.DONE or not event.exit_code:
        return
    cause = (
        f"worker {local.worker_id} exited with code {event.exit_code} after train had returned; "
        "its log says why"
    )
    outcome = replace(
        ending.outcome, exit_code=ExitCode.USER_CODE, cause=cause, worker=local.worker_id
    )
    turn.set(ending=replace(ending, outcome=outcome))


def saves_settled(turn: Turn, error: str) -> None:
    """Take in that no save is under way any more."""
    ending = turn.state.ending
    if ending is None:
        return
    outcome = ending.outcome
    if error and turn.state.rules.fail_on_save_error and outcome.exit_code == ExitCode.DONE:
        outcome = replace(
            outcome, exit_code=ExitCode.STORAGE, cause=f"the last save failed: {error}"
        )
    turn.set(ending=replace(ending, settled=True, lost=error, outcome=outcome))


def go_on_ending(turn: Turn) -> str:
    """Do the next part of the clean-up; returns what is waited for."""
    ending = turn.state.ending
    if ending is None:
        return ""
    if ending.result_due and turn.now_s >= ending.result_until_s:
        ending = _give_up_result(turn, ending)
    if ending.result_due:
        turn.wake(ending.result_until_s)
        if ending.orderly:
            return "writing the result"
    if not ending.told:
        ending = _tell(turn, ending)
    _kill_rest(turn, ending)
    left = turn.state.locals
    if left:
        names = ", ".join(f"{each.worker_id} (pid {each.pid})" for each in left)
        limit_s = ending.told_at_s + KILL_LIMIT_S
        limit_s += turn.state.rules.grace_s if ending.orderly else 0.0
        turn.wake(limit_s)
        if turn.now_s < limit_s:
            return f"waiting for {names} to leave"
        cause = f"{names} could not be ended"
        if ending.outcome.cause:
            cause = f"{cause}; before that: {ending.outcome.cause}"
        _leave(turn, replace(ending.outcome, exit_code=ExitCode.INFRASTRUCTURE, cause=cause))
        return cause
    if not ending.settled:
        limit_s = _settle_until_s(turn, ending) + SETTLE_MARGIN_S
        turn.wake(limit_s)
        if turn.now_s < limit_s:
            return "waiting for the checkpoints under way"
    if ending.result_due:
        return "writing the result"
    _leave(turn, ending.outcome)
    return ending.outcome.cause or "done"


def _give_up_result(turn: Turn, ending: Ending) -> Ending:
    outcome = ending.outcome
    if ending.orderly and len(turn.state.members()) > 1:
        cause = (
            "the result could not be written: the coordination store has been away for "
            f"{turn.state.rules.below_min_timeout_s:g} s"
        )
        outcome = replace(outcome, exit_code=ExitCode.INFRASTRUCTURE, cause=cause)
    turn.set(ending=replace(ending, result_due=False, outcome=outcome))
    assert turn.state.ending is not None
    return turn.state.ending


def _tell(turn: Turn, ending: Ending) -> Ending:
    """Let finished workers leave, kill the others, and settle the saves."""
    if ending.orderly:
        finished = tuple(
            each.worker_id
            for each in turn.state.locals
            if each.finished is not None and each.life is not Life.DYING
        )
        turn.do(c.Tell(word=c.Word.FINISH, worker_ids=finished))
    turn.set(ending=replace(ending, told=True, told_at_s=turn.now_s))
    assert turn.state.ending is not None
    if not ending.settled:
        turn.do(c.SettleSaves(deadline_at_s=_settle_until_s(turn, turn.state.ending)))
    return turn.state.ending


def _settle_until_s(turn: Turn, ending: Ending) -> float:
    rules = turn.state.rules
    if turn.state.stop is not None:
        return max(turn.state.stop.deadline_at_s, ending.told_at_s + 1.0)
    if ending.outcome.exit_code == ExitCode.DONE:
        return ending.told_at_s + max(rules.grace_s, rules.finish_timeout_s)
    return ending.told_at_s + rules.grace_s


def _kill_rest(turn: Turn, ending: Ending) -> None:
    """Kill what is not to leave by itself, or has not in time."""
    grace_until_s = ending.told_at_s + turn.state.rules.grace_s
    for local in turn.state.locals:
        leaves_by_itself = ending.orderly and local.finished is not None
        if leaves_by_itself and turn.now_s < grace_until_s:
            turn.wake(grace_until_s)
        elif local.pid is not None:
            turn.kill(local, "is not needed any more: the run ends", wanted=True)


def _leave(turn: Turn, outcome: c.Outcome) -> None:
    value = outcome.value if isinstance(outcome.value, (bool, int, float, str)) else None
    turn.note(
        "run.finished",
        exit_code=outcome.exit_code,
        value=value,
        cause=outcome.cause,
        worker_traceback=outcome.traceback,
        generation=outcome.generation,
        step=outcome.step,
    )
    turn.do(c.Leave(outcome=outcome))
