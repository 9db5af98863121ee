"""One plain line for each event.

Lines are made from events, never the other way round; nothing may depend on their wording.
`NOTEWORTHY` are the events that a person wants to see while a run goes on: the others are for
`elastic events`.
Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
_WORKER_ID = re.compile(r"[\w.-]+\.(\d+)-[0-9a-f]{6}\b")

NOTEWORTHY: frozenset[str] = frozenset(
    {
        "checkpoint.abandoned",
        "checkpoint.committed",
        "checkpoint.failed",
        "checkpoint.skipped",
        "coord.lost",
        "evaluate.finished",
        "generation.fenced",
        "generation.formed",
        "member.expired",
        "member.joined",
        "reshape.finished",
        "restore.finished",
        "run.stopping",
        "signal.received",
        "shares.changed",
        "state.unclaimed",
        "step.skipped",
        "stranger.refused",
        "worker.exited",
        "worker.failed",
        "worker.stack",
        "worker.suspected",
    }
)

FAILURE_MARK = "everstep: this worker failed:"
"""Line in a worker's log before its last traceback; what follows is shown only when asked for."""

SIGNAL_NAMES = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    15: "SIGTERM",
}


def line(record: Record) -> str:
    """Return what the event says, as one line without time or source."""
    name = str(record.get("event", "?"))
    sentence = _SENTENCES.get(name)
    if sentence is None:
        return _generic(record)
    try:
        return " ".join(sentence(record).split())
    except (KeyError, TypeError, ValueError):  # written by another version: still show it
        return _generic(record)


def full_line(record: Record) -> str:
    """Return the line of `elastic events`: wall time, process, generation, step, what happened."""
    wall = str(record.get("t_wall") or "")
    clock = wall[11:23] or "--:--:--.---"
    source = str(record.get("process") or "?")
    worker_id = record.get("worker_id")
    if worker_id and source == "worker":
        source = worker_name(str(worker_id))
    generation = record.get("generation")
    step = record.get("step")
    place = ("" if generation is None else f"g{generation}") + ("" if step is None else f" s{step}")
    return f"{clock}  {source:<12} {place:<10} {line(record)}"


def worker_name(worker_id: str) -> str:
    """Return the short name of a worker: "worker 2" for n-3fa1.2-8c11d0 (its slot on its host)."""
    slot = worker_id.rpartition(".")[2].partition("-")[0]
    return f"worker {slot}" if slot.isdigit() else f"worker {worker_id}"


def short(text: str) -> str:
    """Return a sentence with each worker id in it replaced by the worker's short name."""
    return _WORKER_ID.sub(r"worker \1", text)


def worker_ids(workers: Sequence[Any]) -> list[str]:
    """Return the worker ids of a World as an event carries it: ids, or records that hold them."""
    return [str(w["worker_id"]) if isinstance(w, Mapping) else str(w) for w in workers]


def signal_name(value: Any) -> str:
    """Return SIGKILL for 9, and any other value as it is."""
    if isinstance(value, int):
        return SIGNAL_NAMES.get(value, f"signal {value}")
    return str(value)


def number(value: Any) -> str:
    """Return a number with four digits that matter; a text unchanged."""
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def innermost(stack: str) -> str:
    """Return where the thread that was asked stood, from faulthandler's listing of all threads."""
    lines = [line.strip() for line in stack.splitlines()]
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), 0)
    frames = [line for line in lines[start:] if line.startswith("File ")]
    return f"in {frames[0].removeprefix('File ')}" if frames else "nowhere that could be told"


def values(log: Mapping[str, Any], *, most: int = 6) -> str:
    """Return logged values as `loss 2.31  accuracy 0.9`."""
    return "  ".join(f"{key} {number(value)}" for key, value in list(log.items())[:most])


def size(count: Any) -> str:
    """Return a number of bytes as a person reads it."""
    left = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if left < 1000:
            return f"{left:.0f} {unit}" if unit == "B" or left >= 100 else f"{left:.1f} {unit}"
        left /= 1000
    return f"{left:.1f} TB"


def _who(record: Record) -> str:
    worker_id = record.get("worker_id")
    rank = record.get("rank")
    name = worker_name(str(worker_id)) if worker_id else str(record.get("process", "?"))
    return name if rank is None or not worker_id else f"{name} (rank {rank})"


def _count(items: Any) -> int:
    return len(items) if isinstance(items, (list, tuple, dict)) else int(items or 0)


def _exited(record: Record) -> str:
    who = f"{_who(record)} (pid {record['pid']})"
    evidence = record["evidence"]
    why = f": {evidence}" if evidence else ""
    if record["signal"]:
        name = signal_name(record["signal"])
        if name == "SIGKILL" and not evidence:
            why = ": perhaps out of memory, or killed by somebody"
        elif str(evidence).startswith("was killed by signal"):
            why = ""  # it says the same
        return f"{who} was killed by {name}{why}"
    if record["exit_code"] == 0:
        return f"{who} ended"
    return f"{who} ended with exit code {record['exit_code']}{why}"


def reshape_ms(record: Record) -> float:
    """Return how long a reshape took in all: from the cut to the first agreement after it."""
    total_ms = record.get("total_ms")
    if total_ms is not None:
        return float(total_ms)
    parts = (record[f"{part}_ms"] for part in ("unblock", "rebuild", "recover", "heal", "redo"))
    return float(sum(part for part in parts if part))


def _reshaped(record: Record) -> str:
    parts = {
        "unblock": record["unblock_ms"],
        "rebuild": record["rebuild_ms"],
        "recover": record["recover_ms"],
        "heal": record["heal_ms"],
        "redo": record["redo_ms"],
    }
    total_ms = reshape_ms(record)
    split = ", ".join(f"{name} {value:.0f}" for name, value in parts.items() if value is not None)
    moved = f", {size(record['heal_bytes'])} moved" if record["heal_bytes"] else ""
    change = _change(record)
    return f"the World is whole again after {total_ms:.0f} ms ({split}{moved}){change}"


def _change(record: Record) -> str:
    left, joined = _count(record["left"]), _count(record["joined"])
    parts = [f"{left} left"] if left else []
    parts += [f"{joined} joined"] if joined else []
    return f": {', '.join(parts)}" if parts else ""


def _finished(record: Record) -> str:
    if record["exit_code"] == 0:
        return "the run is done"
    return f"the run failed with exit code {record['exit_code']}: {record.get('cause') or '?'}"


def _member(record: Record) -> str:
    member = record["member"]
    return str(member.get("node", member)) if isinstance(member, Mapping) else str(member)


def _generic(record: Record) -> str:
    shown = {
        key: value
        for key, value in record.items()
        if key not in ("event", "run", "process", "node", "t_mono_s", "t_wall")
        and value is not None
    }
    return f"{record.get('event', '?')}  " + " ".join(f"{k}={v}" for k, v in shown.items())


_SENTENCES: dict[str, Callable[[Record], str]] = {
    "config.resolved": lambda r: (
        "configuration resolved: "
        + ", ".join(f"{k}={r['config'].get(k)}" for k, v in r["origins"].items() if v != "default")
    ),
    "agent.started": lambda r: (
        "the agent is up"
        + (f", pid {r['pid']}" if r.get("pid") else "")
        + (f", at {r['address']}" if r.get("address") else "")
    ),
    "agent.stopped": lambda r: f"the agent leaves with exit code {r['exit_code']}",
    "signal.received": lambda r: (
        f"{signal_name(r['signal'])} received" + (f": {r['action']}" if r.get("action") else "")
    ),
    "run.planned": lambda r: f"the loop will be done at step {r['total_steps']}",
    "run.stopping": lambda r: f"stopping: {r['reason']}",
    "run.finished": _finished,
    "coord.connected": lambda r: (
        "the coordination store answers" + (f" at {r['endpoints']}" if r.get("endpoints") else "")
    ),
    "coord.lost": lambda r: f"the coordination store is away ({r['reason']}); training goes on",
    "member.joined": lambda r: f"node {_member(r)} joined",
    "member.expired": lambda r: (
        f"node {_member(r)} is gone" + (f": {r['reason']}" if r.get("reason") else "")
    ),
    "worker.started": lambda r: (
        f"{_who(r)} started, pid {r['pid']}" + (" (spare)" if r.get("spare") else "")
    ),
    "worker.ready": lambda r: f"{_who(r)} is ready",
    "worker.suspected": lambda r: f"{_who(r)} (pid {r['pid']}) is suspected: {r['evidence']}",
    "worker.stack": lambda r: f"{_who(r)} stood {innermost(r['stack'])}",
    "worker.exited": _exited,
    "worker.failed": lambda r: (
        f"{_who(r)} raised {r['error']}: {r['message']}"
        + (" (a consequence of another failure)" if r.get("consequence") else "")
    ),
    "worker.finished": lambda r: f"{_who(r)} finished",
    "generation.formed": lambda r: (
        f"generation {r['generation']}: {_count(r['workers'])} "
        f"worker{'s' if _count(r['workers']) != 1 else ''} ({short(str(r['reason']))})"
    ),
    "generation.fenced": lambda r: f"fenced out of generation {r.get('generation')}",
    "reshape.started": lambda r: f"reshape: {r['cause']} (while in {r['phase']})",
    "reshape.finished": _reshaped,
    "data.order": lambda r: (
        f"loader {r['loader']}: {r['samples']} samples ({r['order']}), "
        f"{r['leaves']} micro-batches of {r['batch_size']} per step"
    ),
    "step.committed": lambda r: (
        f"step {r['step']} committed in {float(r['duration_s']):.3f} s  " + values(r["log"])
    ),
    "step.redone": lambda r: f"step {r['step']} is computed again",
    "shares.changed": lambda r: (
        "virtual ranks per worker, by measured speed: "
        f"{' '.join(map(str, r['before']))} -> {' '.join(map(str, r['counts']))}"
    ),
    "state.unclaimed": lambda r: (
        f"restored state that nothing has asked for: {', '.join(r['names'])}; "
        "it stays in checkpoints until something does"
    ),
    "step.skipped": lambda r: f"step {r['step']} changed nothing: {r['reason']}",
    "evaluate.finished": lambda r: f"evaluation: {values(r['values'])}",
    "checkpoint.requested": lambda r: (
        "checkpoint requested" + (f": {r['reason']}" if r.get("reason") else "")
    ),
    "checkpoint.staged": lambda r: (
        f"step {r['step']} staged by {_who(r)}: {size(r['bytes'])} in {r['blocked_ms']:.0f} ms"
    ),
    "checkpoint.skipped": lambda r: f"no checkpoint of step {r['step']}: {r['reason']}",
    "checkpoint.written": lambda r: (
        f"part of step {r['step']} written: {size(r['bytes'])} in {r['duration_s']:.2f} s"
    ),
    "checkpoint.uploaded": lambda r: (
        f"part of step {r['step']} uploaded: {size(r['bytes'])} in {r['duration_s']:.2f} s"
    ),
    "checkpoint.committed": lambda r: f"checkpoint of step {r['step']} committed ({r['tier']})",
    "checkpoint.failed": lambda r: f"checkpoint of step {r['step']} failed: {r['error']}",
    "checkpoint.abandoned": lambda r: f"checkpoint of step {r['step']} given up: {r['reason']}",
    "restore.started": lambda r: f"restoring from {r['source']}",
    "restore.finished": lambda r: (
        f"step {r['step']} restored by {_who(r)}: "
        f"{size(r['bytes_read'])} in {r['duration_s']:.2f} s"
        + (f"; {'; '.join(map(str, r['report']))}" if r["report"] else "")
    ),
    "stranger.refused": lambda r: (
        f"a connection from {r['address']} without the job's token was refused"
    ),
    "hash.state": lambda r: (
        f"state of step {r['step']}: params {r['params']}, "
        f"optimizer {r['optimizer']}, rng {r['rng']}, cursor {r['cursor']}"
    ),
}
