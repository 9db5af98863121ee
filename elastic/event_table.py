"""Every event that any process of a run writes: its name, its fields, what it means.

Names are nouns and past verbs. Events are an interface (checkers, the goodput ledger, the console
and the tests read them): fields are only ever added. `CONTEXT` stands in every record; a required
field that is also a context field may be given either way, but must not be null. A human line is
rendered from an event (elastic/render.py), never the other way round.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CONTEXT: tuple[str, ...] = (
    "event",
    "run",
    "process",
    "node",
    "worker_id",
    "generation",
    "rank",
    "step",
    "t_mono_s",
    "t_wall",
)


@dataclass(frozen=True, slots=True)
class EventSpec:
    """One row of the table: the fields a record must have, those it may have, the meaning."""

    fields: tuple[str, ...]
    meaning: str
    optional: tuple[str, ...] = ()


def _spec(fields: str, meaning: str, optional: str = "") -> EventSpec:
    return EventSpec(tuple(fields.split()), meaning, tuple(optional.split()))


EVENTS: dict[str, EventSpec] = {
    # the run
    "config.resolved": _spec("config origins", "what the run was asked to do and from where"),
    "agent.started": _spec("", "the agent of a node is up", "pid address job resume"),
    "agent.stopped": _spec("exit_code", "the agent is about to leave", "cause"),
    "signal.received": _spec("signal", "a signal reached the caller or the agent", "action"),
    "run.planned": _spec("total_steps", "how many steps the job will have when its loop is done"),
    "run.stopping": _spec("reason", "the run ends after an agreed step"),
    "run.finished": _spec(
        "exit_code value", "the result of the job is written", "cause worker_traceback"
    ),
    # coordination
    "coord.connected": _spec("", "the coordination store answers", "endpoints version"),
    "coord.lost": _spec("reason", "the coordination store is away or the session ended"),
    "member.joined": _spec("member", "a node's record appeared", "address slots incarnation"),
    "member.expired": _spec("member", "a node's record is gone", "reason"),
    "stranger.refused": _spec("address", "a connection without the job's token", "port reason"),
    # workers
    "worker.started": _spec("slot pid", "a worker process exists", "spare"),
    "worker.ready": _spec("", "the worker may be put into a World", "layout"),
    "worker.suspected": _spec("pid evidence", "the worker is stopped or makes no progress"),
    "worker.stack": _spec("stack", "where the threads of a worker are that is ended for a hang"),
    "worker.exited": _spec(
        "pid exit_code signal evidence",
        "the worker process is gone",
        "noticed_at_s",  # when (CLOCK_MONOTONIC) the agent counted it as dead, before it was reaped
    ),
    "worker.failed": _spec(
        "error message traceback",
        "the train function (or the runtime) raised in this worker",
        "virtual_rank kind consequence",
    ),
    "worker.finished": _spec("", "the train function returned", "value"),
    # worlds
    "generation.formed": _spec("workers mode reason", "a new World is in force", "stores"),
    "generation.fenced": _spec("", "this member may write nothing more", "reason"),
    "reshape.started": _spec("cause phase", "the running generation was cut or left"),
    "reshape.finished": _spec(
        "unblock_ms rebuild_ms recover_ms heal_ms redo_ms heal_bytes joined left",
        "the first agreement of the new generation is complete",
        "detect_ms agree_ms total_ms base",
    ),
    # steps
    "data.order": _spec(
        "loader order samples batch_size micro_batches leaves source",
        "how a prepared loader's samples are shared out to steps",
        "items",
    ),
    "step.committed": _spec(
        "step epoch log duration_s samples lr",
        "the step counts on every worker",
        "index grad_norm split reads",
    ),
    "step.redone": _spec("step", "the step is computed again after a reshape"),
    "step.skipped": _spec("step reason", "the step changed no parameter"),
    "shares.changed": _spec("counts before", "virtual ranks are shared out anew by measured speed"),
    "state.unclaimed": _spec("names", "restored state that no object has been registered for"),
    "evaluate.finished": _spec("values", "an evaluation is complete on all workers", "duration_s"),
    "hash.state": _spec("params optimizer rng cursor", "debug aid: digests of the state"),
    # checkpoints
    "checkpoint.requested": _spec("", "somebody asked for a checkpoint", "reason"),
    "checkpoint.staged": _spec("bytes blocked_ms", "a worker's part is in its arena", "half"),
    "checkpoint.skipped": _spec("reason", "no checkpoint is made of this step"),
    "checkpoint.written": _spec("bytes duration_s", "a pack is durable on the local tier"),
    "checkpoint.uploaded": _spec("bytes duration_s", "a pack is durable on the remote tier"),
    "checkpoint.committed": _spec("tier manifest", "the manifest is there: it can be restored"),
    "checkpoint.failed": _spec("error", "a part of a checkpoint could not be written", "tier"),
    "checkpoint.abandoned": _spec("reason", "a checkpoint will not be completed"),
    "restore.started": _spec("source", "state is being read from a checkpoint"),
    "restore.finished": _spec(
        "step bytes_read duration_s report", "state of that step is in place", "source"
    ),
}


class UnknownEvent(ValueError):
    """An event that the table does not allow: our bug, found where it is emitted."""


def check(name: str, record: Mapping[str, object]) -> None:
    """Raise UnknownEvent unless `name` is in the table and no required field is missing.

    A required field may be null only if it is no context field: `signal=None` says that no signal
    ended the worker, but a committed step without its number says nothing.
    """
    spec = EVENTS.get(name)
    if spec is None:
        raise UnknownEvent(f"no event is named {name!r}; add it to elastic/event_table.py")
    missing = [
        field
        for field in spec.fields
        if field not in record or (field in CONTEXT and record[field] is None)
    ]
    if missing:
        raise UnknownEvent(f"event {name} lacks {', '.join(missing)}")


def undeclared(name: str, fields: Iterable[str]) -> list[str]:
    """Return those fields that neither the row of `name` nor the context declares."""
    spec = EVENTS[name]
    return sorted(set(fields) - set(spec.fields) - set(spec.optional) - set(CONTEXT))
