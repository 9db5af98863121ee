"""The runs that one process has made so far, for scripts that call `elastic.run()` twice.

A worker of the second run starts the script from its top, so it passes the first call again; there
it gets what the caller got: the same result, or the same error. Entries are plain values and travel
in the agent's spec (`run_index`, `earlier_results`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import Misconfigured, RunFailed
from elastic.result import RunResult
from elastic.values import from_plain, to_plain

Entry = dict[str, Any]


def to_entry(outcome: RunResult | RunFailed | Misconfigured) -> Entry:
    """Return the outcome of a run as plain values."""
    if isinstance(outcome, RunResult):
        return {
            "kind": "result",
            "value": to_plain(outcome.value),
            "step": outcome.step,
            "generation": outcome.generation,
            "events_path": outcome.events_path,
            "goodput": outcome.goodput,
        }
    if isinstance(outcome, RunFailed):
        return {"kind": "failed", "exit_code": outcome.exit_code, "cause": outcome.cause}
    return {
        "kind": "misconfigured",
        "message": outcome.message,
        "error_kind": outcome.kind,
        "hint": outcome.hint,
    }


def replay(entry: Mapping[str, Any]) -> RunResult:
    """Return, or raise, what the caller got from that run."""
    if entry["kind"] == "failed":
        raise RunFailed(entry["exit_code"], entry["cause"])
    if entry["kind"] == "misconfigured":
        raise Misconfigured(entry["message"], kind=entry["error_kind"], hint=entry["hint"])
    return RunResult(
        value=from_plain(entry["value"]),
        step=entry["step"],
        generation=entry["generation"],
        events_path=entry["events_path"],
        goodput=entry["goodput"],
    )


@dataclass(slots=True)
class Ledger:
    """Calls of `elastic.run()` in this process, in the order in which they began."""

    entries: list[Entry | None] = field(default_factory=list)
    roots_done: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> int:
        """Count a new call and return its index."""
        with self._lock:
            self.entries.append(None)
            return len(self.entries) - 1

    def end(self, index: int, outcome: RunResult | RunFailed | Misconfigured) -> None:
        """Keep the outcome of a call."""
        self.entries[index] = to_entry(outcome)

    def before(self, index: int) -> list[Entry]:
        """Return the outcomes before a call. Raises Misconfigured: one of them is still running."""
        entries = self.entries[:index]
        done = [entry for entry in entries if entry is not None]
        if len(done) < len(entries):
            raise Misconfigured(
                "another elastic.run() of this script is still running",
                kind="run-in-run",
                hint="run one after the other, or start each from its own script",
            )
        return done

    def check_roots(self, roots: list[str]) -> None:
        """Raise Misconfigured if an earlier run of this process was completed in these places."""
        for root in roots:
            if root in self.roots_done:
                raise Misconfigured(
                    f"{root} holds the job that run {self.roots_done[root] + 1} of this script "
                    "completed",
                    kind="same-root",
                    hint="give each run its own job and checkpoint (and remote)",
                )

    def complete(self, index: int, roots: list[str]) -> None:
        """Note that the run at `index` was completed in these places."""
        self.roots_done.update(dict.fromkeys(roots, index))
