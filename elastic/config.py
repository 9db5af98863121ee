"""What a run was asked to do: one frozen record, and from where each of its values came.

Values come from the arguments of `elastic.run()`, then from EVERSTEP_* in the environment, then
from the command line of `elastic run`; later ones win. The argv of the user's script is never
read. An unknown name is an error that lists the nearest known ones. This is the only file that
reads the environment. How single fields are read stands in elastic/config_fields.py; whether the
machine can hold what was asked for is checked by elastic/preflight.py.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from elastic.config_fields import BY_ENV, BY_NAME, ENV_PREFIX, FIELDS, Field, NotAllowed
from elastic.errors import Misconfigured


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """All settings of a run; equal on every node of a job except where the field says so."""

    job: str | None = None
    """Name of the job, the prefix of all its keys in etcd. Without it a name is made once, kept in
    `job.json` of the checkpoint directory and printed. Two live runs never share a name."""

    checkpoint: str | None = None
    """Directory of this host for checkpoints (the local tier); made when missing. Without it and
    without `remote` nothing is saved, and a job that loses all its workers starts anew."""

    remote: str | None = None
    """Address of the second, shared tier: any fsspec URL such as `s3://bucket/job`, or a directory
    that all hosts see. It is what a new host restores from."""

    resume: int | str = "auto"
    """What to begin with: `auto` (the newest whole checkpoint, else from the start), `fresh` (from
    the start), a step number, or the address of another job's checkpoints."""

    seed: int = 0
    """Seed of the sample order and of every random number generator. Comes from the checkpoint on
    resume; another explicit value is refused, because it would change the result unnoticed."""

    nproc: int | None = None
    """Workers on this host; may differ between hosts. `auto`: one per GPU, one where there is no
    GPU."""

    nodes: str = "1:1"
    """Fewest and most hosts, "min:max". Below the fewest the run pauses, its state in memory."""

    spares: int = 0
    """Workers kept warm beside `nproc` on this host, torch imported, outside the World. One spare
    makes the way back to full strength after a loss short and costs its memory."""

    respawn: bool = True
    """Whether a worker that died is started again. Off: the run goes on with those left."""

    etcd: tuple[str, ...] = ()
    """Servers of the coordination store as host:port. None given: the run starts its own on
    loopback, which ties the job to this host."""

    node: str | None = None
    """Name of this host in the job; differs between hosts. Without it a random one is made."""

    bind: str = "127.0.0.1"
    """Address that all our sockets listen on; differs between hosts. Loopback keeps a one-host job
    unreachable from outside; several hosts need an address that the others reach."""

    advertise: str | None = None
    """Address that other hosts use to reach this one, when it is not `bind` (a NAT, a pod)."""

    virtual_ranks: int | None = None
    """Micro-batches of one global step; the same for the whole life of a job, whatever the world
    size. `auto`: twice the largest world. Fewer than the workers is refused; more than four times
    as many costs partial sums and gains nothing. Comes from the checkpoint on resume."""

    balance: bool = True
    """Whether slower workers get fewer virtual ranks, by measured time. The result is the same."""

    accumulate: int = 1
    """Micro-batches that each virtual rank runs per step. Multiplies the global batch."""

    segments: int | str = 64
    """Pieces into which the trainable state is cut. More pieces balance finer and cost a little
    more bookkeeping; `parameter` cuts only between parameters, for optimizers that need them
    whole. Comes from the checkpoint on resume."""

    replicas: int = 2
    """Copies of each piece of optimizer state. 2 survives any single loss without a checkpoint;
    1 saves memory and falls back to the newest checkpoint."""

    threads: int = 1
    """Intra-op threads of each worker; fixed for the job, because sums depend on it. Comes from
    the checkpoint on resume."""

    reduction: str = "exact"
    """`exact`: gradients are summed in one order at any world size, so results are bit-equal.
    `fast`: the library's all-reduce, equal only within rounding."""

    overlap: bool = True
    """Whether gradients are sent while the last backward still runs. A loop body that changes
    gradients after backward() is noticed, its step is computed again, and this is off then."""

    backend: str = "gloo"
    """Transport of the process group: `gloo` for CPUs, `nccl` for GPUs."""

    save_every: int | str | None = None
    """When to save: every so many steps, a time such as `5min`, or `auto` (so often that saving
    costs about 1 %). None: only on request and when leaving."""

    keep: int | None = None
    """How many checkpoints stay; older ones expire, never the last usable one. None: all stay."""

    stage: str = "primary"
    """Who copies state for a save: `primary` once per piece; `holders` twice, so that a save can
    be finished when the host of the primary is gone."""

    when_busy: str = "skip"
    """What a save does while the last two are still being written: `skip` it, or `wait`."""

    on_save_error: str = "warn"
    """Whether a failed save is only told (`warn`) or ends the run with exit code 6 (`fail`)."""

    max_nonfinite_steps: int = 50
    """Steps one after the other whose gradient may be NaN or infinite, each skipped on all workers,
    before the run ends with exit code 5. 0: never."""

    guard_every: int = 100
    """Steps between two comparisons of checksums between workers: rows and optimizer state of one
    segment in turn, and all global state. 0: never."""

    lease_ttl_s: float = 5.0
    """Seconds after which the store forgets a silent node. etcd grants no less than 2. Small: a
    short pause of the store looks like a death; large: a lost host is noticed late."""

    hang_timeout_s: float | str = "auto"
    """Seconds without progress after which a worker that holds up the others counts as dead;
    never less than three steps. `auto`: ten steps, and at least a second for a process that is
    stopped, a minute for one that runs."""

    slow_timeout_s: float = 600.0
    """The same where slowness is legal: a worker's first steps, compiling, evaluations, saves, and
    code between steps. Too small: a long compilation on one worker counts as its death."""

    min_wait_s: float = 1.0
    """Seconds that a World waits for further joiners once enough members are there, so that nodes
    that start together make one World and not several."""

    below_min_timeout_s: float = 600.0
    """Seconds to stay paused with fewer nodes than the fewest of `nodes`; then exit code 4."""

    max_failures: int = 100
    """Failures of workers that the whole job may have; the next one ends it with exit code 5."""

    max_reshapes: int = 1000
    """Changes of the World that the whole job may make, clean ones included. Ends a job that
    flaps for ever."""

    grace_s: float = 25.0
    """Seconds between the first notice signal and the end, saving included. Keep it below what
    the scheduler grants (Kubernetes: 30, hence 25)."""

    notice_signals: tuple[str, ...] = ("SIGTERM",)
    """Signals that mean: this host goes away soon, drain it. Add SIGUSR1 where Slurm sends it."""

    log_dir: str | None = None
    """Where run directories are made. Without it: `runs` in the checkpoint directory, else
    `.everstep/<job>` here."""

    console: str = "auto"
    """How progress is shown: `live` on a terminal, `plain` lines elsewhere, `auto` chooses, `off`
    shows only what the main worker prints."""

    metrics_port: int | None = None
    """Port of the metrics page, 0 for any free one. None: no page."""

    debug: bool = False
    """Show tracebacks and the agent's own log; costs nothing while training."""

    def __post_init__(self) -> None:
        """Keep every value in its one form; refuse values and relations that cannot work."""
        for field in FIELDS:
            value = _read(field, getattr(self, field.name), "")
            object.__setattr__(self, field.name, value)
        check_relations(self)

    @property
    def min_nodes(self) -> int:
        """The fewest hosts."""
        return int(self.nodes.partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """The most hosts."""
        return int(self.nodes.partition(":")[2])

    @property
    def save_every_steps(self) -> int | None:
        """Steps between saves, when the interval was given in steps."""
        return self.save_every if isinstance(self.save_every, int) else None

    @property
    def save_every_s(self) -> float | None:
        """Seconds between saves, when the interval was given as a time."""
        timed = isinstance(self.save_every, str) and self.save_every != "auto"
        return float(str(self.save_every).removesuffix("s")) if timed else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Undo `to_dict`. Raises Misconfigured."""
        return cls(**_read_all(plain, "", "argument"))


class Origin(StrEnum):
    """Where the value of a field came from; also the word that a person reads."""

    DEFAULT = "default"
    ARGUMENT = "argument"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"
    MACHINE = "this machine"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and for each field the origin of its value."""

    config: ElasticConfig
    origins: Mapping[str, Origin]

    def is_explicit(self, field: str) -> bool:
        """Whether a person gave this value, rather than a default or the machine."""
        return self.origins[field] in (Origin.ARGUMENT, Origin.ENVIRONMENT, Origin.COMMAND_LINE)

    def replace(self, origin: Origin, **values: Any) -> Resolved:
        """Return the same with these values, which came from `origin`."""
        config = dataclasses.replace(self.config, **values)
        return Resolved(config, {**self.origins, **dict.fromkeys(values, origin)})


def resolve(
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    command_line: Mapping[str, Any] | None = None,
) -> Resolved:
    """Combine what was given; the command line wins over the environment, that over arguments.

    Raises Misconfigured: an unknown name, or a value or relation that is not allowed.
    """
    origins = {field.name: Origin.DEFAULT for field in FIELDS}
    values: dict[str, Any] = {}
    sources = (
        (Origin.ARGUMENT, _read_all(arguments, "", "argument")),
        (Origin.ENVIRONMENT, _read_environ(environ)),
        (Origin.COMMAND_LINE, _read_all(command_line or {}, "--", "option")),
    )
    for origin, given in sources:
        values.update(given)
        origins.update(dict.fromkeys(given, origin))
    return Resolved(ElasticConfig(**values), origins)


def process_environ() -> dict[str, str]:
    """Return a copy of this process's environment; nobody else in the package reads it."""
    return dict(os.environ)


def check_relations(config: ElasticConfig) -> None:
    """Raise Misconfigured if two fields contradict each other, or one asks for too much."""
    for field in FIELDS:
        value = getattr(config, field.name)
        if field.is_not_yet(value):
            raise Misconfigured(
                f"{field.name}={value} is not available in this version",
                kind="not-yet",
                hint=f"leave it at {shown(field.name, default_of(field.name))}",
            )
    workers = (config.nproc or 1) * config.max_nodes
    if config.virtual_ranks is not None and config.virtual_ranks < workers:
        raise Misconfigured(
            f"virtual_ranks={config.virtual_ranks} is less than the {workers} workers that "
            f"nproc={config.nproc or 1} and nodes={config.nodes} ask for",
            kind="too-few-virtual-ranks",
            hint=f"set virtual_ranks to at least {workers}, or ask for fewer workers",
        )
    if config.max_nodes > 1 and not config.etcd:
        raise Misconfigured(
            f"nodes={config.nodes} asks for several hosts, but etcd is empty",
            kind="etcd-missing",
            hint='give the servers, such as etcd=["10.0.0.1:2379"], and a job name',
        )
    if config.etcd and config.job is None:
        raise Misconfigured(
            "etcd is given without a job, and jobs that share a store need their own names",
            kind="job-missing",
            hint="give the same job=NAME on every host",
        )
    if config.save_every is not None and config.checkpoint is None and config.remote is None:
        raise Misconfigured(
            f"save_every={config.save_every} has no place to save to",
            kind="checkpoint-missing",
            hint="give checkpoint=DIR or remote=URL",
        )
    if config.on_save_error == "fail" and config.checkpoint is None and config.remote is None:
        raise Misconfigured(
            'on_save_error="fail" has no place to save to',
            kind="checkpoint-missing",
            hint="give checkpoint=DIR or remote=URL",
        )
    if not isinstance(config.resume, str) and config.checkpoint is None and config.remote is None:
        raise Misconfigured(
            f"resume={config.resume} names a step, but there is no checkpoint to take it from",
            kind="checkpoint-missing",
            hint="give checkpoint=DIR or remote=URL",
        )


@functools.cache
def field_docs() -> Mapping[str, str]:
    """Return the docstring under each field, on one line; empty where there is no source text."""
    try:
        tree = ast.parse(inspect.cleandoc(inspect.getsource(ElasticConfig)))
    except (OSError, SyntaxError):
        return {field.name: "" for field in FIELDS}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for node, after in itertools.pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[node.target.id] = " ".join(str(after.value.value).split())
    return docs


def default_of(field: str) -> Any:
    """Return the default of a field."""
    return ElasticConfig.__dataclass_fields__[field].default


def shown(field: str, value: Any) -> str:
    """Return a field's value as a person would write it."""
    if value is None:
        return BY_NAME[field].unset
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return ",".join(str(item) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for env in sorted(environ):
        if not env.startswith(ENV_PREFIX):
            continue
        field = BY_ENV.get(env)
        if field is None:
            raise _unknown(env, list(BY_ENV), "environment name")
        if environ[env]:  # empty: the usual way to unset a name for one command
            values[field.name] = _read(field, environ[env], env)
    return values


def _read_all(given: Mapping[str, Any], prefix: str, what: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in given.items():
        field = BY_NAME.get(name)
        if field is None:
            raise _unknown(name, list(BY_NAME), what)
        values[name] = _read(field, value, field.flag if prefix else name)
    return values


def _read(field: Field, value: Any, shown_as: str) -> Any:
    try:
        return field.read(value)
    except NotAllowed as error:
        raise Misconfigured(
            f"{shown_as or field.name}={value!r} {error}", kind="bad-value", field=field.name
        ) from None


def _unknown(name: str, known: list[str], what: str) -> Misconfigured:
    bare = {each.removeprefix(ENV_PREFIX).lower(): each for each in known}
    wanted = name.removeprefix(ENV_PREFIX).lower()
    near = [bare[each] for each in difflib.get_close_matches(wanted, bare, n=2, cutoff=0.7)]
    hint = f"did you mean {' or '.join(near)}?" if near else "see docs/configuration.md for all"
    return Misconfigured(f"unknown {what} {name}", kind="unknown-name", hint=hint, name=name)
