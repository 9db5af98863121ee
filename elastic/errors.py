"""Errors grouped by what the one who catches them does next.

    ElasticError
    ├── Retryable        do the same again after `after_s`
    ├── Fenced           stop writing at once: the others go on without this member
    ├── Reform           leave this generation and form the next one
    │   └── Reshaped     what a collective on `ctx.group` raises then; the iterators handle it
    ├── Misconfigured    tell a person what to change; trying again cannot help
    └── Fatal            give the run up and say why
        └── RunFailed    what `elastic.run()` raises: the run ended with `exit_code`

Each error is one plain sentence for a person (what, where, what to do). It has a stable `kind` for
programs and its numbers as fields in `facts`; the sentence is no interface. Nothing here decides
*whether* to retry or reform: that is for the pure machines that these errors reach as events.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command or a run tells its caller; one code for each thing that a caller would do.

    A run that was ended by signal n after a clean drain leaves with 128 + n (see `ended_by`).
    """

    DONE = 0
    ANSWER_IS_NO = 1
    MISCONFIGURED = 2
    FENCED = 3
    BELOW_MINIMUM = 4
    USER_CODE = 5
    STORAGE = 6
    INFRASTRUCTURE = 7


MEANINGS: dict[int, str] = {
    ExitCode.DONE: "done",
    ExitCode.ANSWER_IS_NO: "the answer is no",
    ExitCode.MISCONFIGURED: "misconfigured",
    ExitCode.FENCED: "fenced: the others went on without this member",
    ExitCode.BELOW_MINIMUM: "fewer nodes than the minimum for too long",
    ExitCode.USER_CODE: "the train function failed",
    ExitCode.STORAGE: "storage: no checkpoint can be read, or a save that must not fail failed",
    ExitCode.INFRASTRUCTURE: "infrastructure failed",
}

SIGNAL_BASE = 128


def ended_by(signal_number: int) -> int:
    """Return the exit code of a run that drained cleanly because of that signal."""
    return SIGNAL_BASE + signal_number


def meaning(exit_code: int) -> str:
    """Say in a few words what an exit code means."""
    if exit_code > SIGNAL_BASE:
        return f"ended by signal {exit_code - SIGNAL_BASE} after a clean drain"
    return MEANINGS.get(exit_code, f"exit code {exit_code}")


class ElasticError(Exception):
    """Base of all errors of this package; never raised itself.

    Args:
        message: what is wrong and where, one sentence without a full stop.
        kind: stable name for programs; names are only ever added.
        hint: what a person can do now; joined to the message by a semicolon.
        facts: the values that the message mentions.
    """

    default_kind = "elastic"

    def __init__(
        self, message: str, *, kind: str | None = None, hint: str = "", **facts: object
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or self.default_kind
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class Retryable(ElasticError):
    """The same call may succeed when it is made again after `after_s`."""

    default_kind = "retryable"

    def __init__(
        self,
        message: str,
        *,
        after_s: float = 0.0,
        kind: str | None = None,
        hint: str = "",
        **facts: object,
    ) -> None:
        super().__init__(message, kind=kind, hint=hint, **facts)
        self.after_s = after_s


class Fenced(ElasticError):
    """The others go on without this member; nothing that it writes from now on may count."""

    default_kind = "fenced"


class Reform(ElasticError):
    """This generation is over; the caller goes on in the next one."""

    default_kind = "reform"


class Reshaped(Reform):
    """A collective was cut because the World changed; the step is given out again."""

    default_kind = "reshaped"


class Misconfigured(ElasticError):
    """What was asked for cannot work; a person has to change it."""

    default_kind = "misconfigured"


class Fatal(ElasticError):
    """The run cannot go on."""

    default_kind = "fatal"


class UserError(Fatal):
    """The training code asked for something that has no meaning in an elastic step."""

    default_kind = "user"


class RunFailed(Fatal):
    """A run ended without success: `exit_code` for programs, `cause` for a person.

    `traceback` is the failing worker's own, when it had one; it is never part of `str()`.
    """

    default_kind = "run-failed"

    def __init__(
        self,
        exit_code: int,
        cause: str,
        *,
        traceback: str = "",
        worker: str = "",
        run_dir: str = "",
    ) -> None:
        super().__init__(cause)
        self.exit_code = int(exit_code)
        self.cause = cause
        self.traceback = traceback
        self.worker = worker
        self.run_dir = run_dir

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _run_failed,
            (self.exit_code, self.cause, self.traceback, self.worker, self.run_dir),
        )


def _run_failed(exit_code: int, cause: str, traceback: str, worker: str, run_dir: str) -> RunFailed:
    return RunFailed(exit_code, cause, traceback=traceback, worker=worker, run_dir=run_dir)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code with which a process leaves because of this error."""
    if isinstance(error, RunFailed):
        return error.exit_code
    if isinstance(error, Misconfigured):
        return ExitCode.MISCONFIGURED
    if isinstance(error, Fenced):
        return ExitCode.FENCED
    if isinstance(error, KeyboardInterrupt):
        return ended_by(2)
    return ExitCode.INFRASTRUCTURE
