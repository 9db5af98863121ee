"""The membership machine of one agent: everything that it decides, in one pure function.

The agent feeds events to `step` and carries out the commands that come back; it decides nothing.
Each turn first turns the event into facts (absorb), then asks in a fixed order what follows: is the
end under way (ending), which of this node's processes to start or to give up (supervise), has
training finished, which write to the store is due (worlds, choose_world), who stops (ending). The
phase is derived from the facts; the moves that are legal stand in MOVES, and any other one is our
bug. What is waited for comes back as one sentence, and the time at which waiting may end.

It never touches the store, a process or a clock, and it keeps nothing outside its state.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from elastic.membership import ending, supervise, worlds
from elastic.membership.absorb import absorb
from elastic.membership.choose_world import Choice, Proposal, Waiting
from elastic.membership.commands import Decision, Event, Leave, OpenSession
from elastic.membership.state import Rules, Session, Slot, State, Turn


class Phase(StrEnum):
    """Where the job stands, as one agent sees it."""

    JOINING = "joining"  # not yet registered, or the job's configuration not yet settled
    GATHERING = "gathering"  # no World with living workers: fewer are ready than are needed
    SETTLING = "settling"  # enough are ready; waiting a moment for more
    FORMED = "formed"  # a World is in force
    PAUSED = "paused"  # a World is in force, but too few nodes are left to go on
    STOPPING = "stopping"  # asked to end; workers end after an agreed step
    ENDING = "ending"  # the outcome is known; telling everyone and cleaning up
    CLOSED = "closed"  # nothing more will be decided


MOVES: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        Phase.JOINING: frozenset(
            {
                Phase.GATHERING,
                Phase.SETTLING,
                Phase.FORMED,
                Phase.PAUSED,
                Phase.STOPPING,
                Phase.ENDING,
                Phase.CLOSED,
            }
        ),
        Phase.GATHERING: frozenset(
            {Phase.SETTLING, Phase.FORMED, Phase.PAUSED, Phase.STOPPING, Phase.ENDING, Phase.CLOSED}
        ),
        Phase.SETTLING: frozenset(
            {
                Phase.GATHERING,
                Phase.FORMED,
                Phase.PAUSED,
                Phase.STOPPING,
                Phase.ENDING,
                Phase.CLOSED,
            }
        ),
        Phase.FORMED: frozenset(
            {
                Phase.GATHERING,  # all its workers died
                Phase.SETTLING,
                Phase.PAUSED,
                Phase.STOPPING,
                Phase.ENDING,
                Phase.CLOSED,
            }
        ),
        Phase.PAUSED: frozenset(
            {
                Phase.FORMED,
                Phase.GATHERING,
                Phase.SETTLING,
                Phase.STOPPING,
                Phase.ENDING,
                Phase.CLOSED,
            }
        ),
        Phase.STOPPING: frozenset({Phase.ENDING, Phase.CLOSED}),
        Phase.ENDING: frozenset(
            {
                Phase.FORMED,  # somebody died before the result was written
                Phase.PAUSED,
                Phase.GATHERING,
                Phase.SETTLING,
                Phase.STOPPING,
                Phase.CLOSED,
            }
        ),
        Phase.CLOSED: frozenset(),
    }
)


class IllegalMove(AssertionError):
    """The machine went from one phase to another that MOVES does not allow: our bug."""


def begin(*, node: str, incarnation: str, address: str, rules: Rules, now_s: float) -> Decision:
    """Return the first decision of an agent: register, and have the helpers started."""
    state = State(
        node=node,
        incarnation=incarnation,
        address=address,
        rules=rules,
        phase=Phase.JOINING,
        session=Session.OPENING,
        slots=tuple(Slot(slot=slot) for slot in range(rules.slots + rules.spares)),
    )
    turn = Turn(state, now_s)
    member = state.own_member()
    turn.set(registering=member)
    turn.do(OpenSession(member=member))
    supervise.supervise(turn)
    return Decision(
        state=turn.state,
        commands=tuple(turn.commands),
        wake_at_s=turn.wake_at_s,
        reason="registering with the coordination store",
    )


def step(state: State, event: Event, now_s: float) -> Decision:
    """Decide what follows from one event. Same inputs, same Decision.

    Raises IllegalMove: a move that is not in MOVES (our bug).
    """
    turn = Turn(state, now_s)
    if state.phase is Phase.CLOSED:
        return Decision(state=state, commands=(), wake_at_s=None, reason=state.reason)
    absorb(turn, event)
    choice: Choice = Waiting()
    if turn.state.ending is None:
        supervise.supervise(turn)
        ending.check_finished(turn)
    if turn.state.ending is None:
        choice = worlds.coordinate(turn)
        if turn.state.leaving and isinstance(choice, Waiting) and choice.below_minimum:
            ending.leave_at_once(turn)
        ending.go_on_stopping(turn)
    reason = _reason(turn.state, choice)
    if turn.state.ending is not None:
        reason = ending.go_on_ending(turn)
        if turn.state.ending.result_due:
            supervise.keep_session(turn)
            worlds.write_result(turn, turn.state.ending.outcome)
    _move(turn, choice)
    turn.set(reason=reason)
    return Decision(
        state=turn.state,
        commands=tuple(turn.commands),
        wake_at_s=turn.wake_at_s,
        reason=reason,
    )


def _move(turn: Turn, choice: Choice) -> None:
    """Derive the phase from the facts and check that the move is legal."""
    before, after = turn.state.phase, _phase(turn, choice)
    if after is not before:
        if after not in MOVES[before]:
            raise IllegalMove(f"{before} to {after}")
        turn.set(phase=after)


def _phase(turn: Turn, choice: Choice) -> Phase:
    state = turn.state
    if any(isinstance(command, Leave) for command in turn.commands):
        return Phase.CLOSED
    if state.ending is not None:
        return Phase.ENDING
    if state.stop is not None:
        return Phase.STOPPING
    if not state.entered:
        return Phase.JOINING
    if state.world is None or not state.survivors(worlds.lost_nodes(state, turn.now_s)):
        settling = isinstance(choice, Waiting) and choice.settling
        return Phase.SETTLING if settling or isinstance(choice, Proposal) else Phase.GATHERING
    if isinstance(choice, Waiting) and choice.below_minimum:
        return Phase.PAUSED
    return Phase.FORMED


def _reason(state: State, choice: Choice) -> str:
    if not state.entered:
        return "registering with the coordination store"
    if state.session is not Session.LIVE:
        return "the session with the coordination store is lost; nothing is decided meanwhile"
    if isinstance(choice, Proposal):
        return f"proposing generation {choice.world.generation}: {choice.world.reason}"
    if choice.why:
        return choice.why
    if state.stop is not None:
        return f"{state.stop.cause}: the workers end after an agreed step"
    if state.world is None:
        return "nobody is ready"
    return f"generation {state.world.generation}: {state.world.reason}"
