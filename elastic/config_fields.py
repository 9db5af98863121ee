"""How each configuration field is read from a value or from text, one row per field.

The table `FIELDS` maps a field of ElasticConfig to its environment name, its command-line flag and
its reader; `elastic run --help`, docs/configuration.md and the unknown-name check come from it.
A reader takes what a person gave (a Python value, or text from the environment or the command
line) and returns the one form in which the configuration keeps it, or raises NotAllowed with what
would have been right. Relations between fields are not checked here, but in ElasticConfig.
Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ENV_PREFIX = "EVERSTEP_"
ANY = "any"


class NotAllowed(ValueError):
    """The value cannot be taken; the text says what can: "must be a number of seconds"."""


Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One row of the table."""

    name: str
    read: Reader
    metavar: str
    group: str
    unset: str = "none"
    """What a person reads and writes for None."""

    not_yet: tuple[str, ...] = ()
    """Values that are part of the interface and not built yet: refused, never ignored. `ANY` means
    every value but None."""

    @property
    def env(self) -> str:
        """The environment name, EVERSTEP_NPROC for nproc."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The option of `elastic run`, --lease-ttl-s for lease_ttl_s."""
        return "--" + self.name.replace("_", "-")

    def is_not_yet(self, value: Any) -> bool:
        """Whether this value has to be refused for now."""
        return value in self.not_yet or (ANY in self.not_yet and value is not None)

    @property
    def is_switch(self) -> bool:
        """Whether the option takes no value (--debug / --no-debug)."""
        return self.read is switch


def integer(least: int, most: int | None = None) -> Reader:
    """Accept a whole number in a range."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(value: Any) -> int:
        number = _whole(value)
        if number is None or number < least or (most is not None and number > most):
            raise NotAllowed(f"must be a whole number {limits}")
        return number

    return read


def seconds(least: float) -> Reader:
    """Accept seconds as a number, or a text with a unit: 0.5, "500ms", "30s", "5min", "2h"."""

    def read(value: Any) -> float:
        span_s = _span_s(value)
        if span_s is None or span_s < least:
            raise NotAllowed(f'must be seconds, at least {least:g}: 30, "500ms", "30s" or "5min"')
        return span_s

    return read


def choice(*words: str) -> Reader:
    """Accept one of a few words."""

    def read(value: Any) -> str:
        if value not in words:
            raise NotAllowed(f"must be {_either(words)}")
        return str(value)

    return read


def optional(read: Reader, word: str = "none") -> Reader:
    """Accept None (in text: the word) besides what `read` accepts."""

    def read_optional(value: Any) -> Any:
        return None if value is None or value == word else read(value)

    return read_optional


def or_word(word: str, read: Reader) -> Reader:
    """Accept one word besides what `read` accepts."""

    def read_or_word(value: Any) -> Any:
        if value == word:
            return word
        try:
            return read(value)
        except NotAllowed as error:
            raise NotAllowed(f'{error}, or "{word}"') from None

    return read_or_word


def text(value: Any) -> str:
    """Accept a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise NotAllowed("must be a text that is not empty")
    return value.strip()


def switch(value: Any) -> bool:
    """Accept True or False; in text 1/0, true/false, yes/no, on/off."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("1", "true", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("0", "false", "no", "off"):
        return False
    raise NotAllowed("must be true or false")


def name(value: Any) -> str:
    """Accept a name that can stand in a key, a path and a file name."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value):
        raise NotAllowed(
            "must be up to 63 letters, digits, '.', '_' or '-', not beginning with a sign"
        )
    return value


def path(value: Any) -> str:
    """Accept the path of a directory of this host (a text or an os.PathLike)."""
    found = value.__fspath__() if hasattr(value, "__fspath__") else value
    if not isinstance(found, str) or not found.strip():
        raise NotAllowed("must be the path of a directory")
    if "://" in found:
        raise NotAllowed(
            "must be a directory of this host; an address like s3://... goes to remote"
        )
    return found


def address(value: Any) -> str:
    """Accept an fsspec URL (s3://bucket/job) or the path of a shared directory."""
    found = value.__fspath__() if hasattr(value, "__fspath__") else value
    if not isinstance(found, str) or not found.strip():
        raise NotAllowed("must be an address such as s3://bucket/job, or a shared directory")
    scheme, mark, rest = found.partition("://")
    if mark and (not scheme or not rest.strip("/")):
        raise NotAllowed("must name a place after its scheme, such as s3://bucket/job")
    return found


def host(value: Any) -> str:
    """Accept a host name or an address, without a port."""
    found = value.strip("[]") if isinstance(value, str) else ""
    if not re.fullmatch(r"[A-Za-z0-9.:%_-]+", found):
        raise NotAllowed("must be a host name or an address, without a port")
    return found


def endpoints(value: Any) -> tuple[str, ...]:
    """Accept etcd servers as "host:port", one or several; http:// or https:// may stand before."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise NotAllowed('must be a list of "host:port"')
    found: list[str] = []
    for item in items:
        server = item.strip() if isinstance(item, str) else ""
        if not re.fullmatch(r"(https?://)?(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):\d{1,5}/?", server):
            raise NotAllowed('must be a list of "host:port", such as ["10.0.0.1:2379"]')
        found.append(server.rstrip("/"))
    return tuple(found)


def node_range(value: Any) -> str:
    """Accept "min:max" or one number for both; kept as "min:max"."""
    low, mark, high = str(value).partition(":")
    least, most = _whole(low), _whole(high if mark else low)
    if isinstance(value, bool) or least is None or most is None or not 1 <= least <= most:
        raise NotAllowed('must be "min:max" with 1 <= min <= max, such as "2:4"')
    return f"{least}:{most}"


def save_interval(value: Any) -> int | str:
    """Accept a number of steps, a span with its unit ("5min"; kept as "300s") or "auto"."""
    if value == "auto":
        return "auto"
    steps = _whole(value)
    if steps is not None and steps >= 1:
        return steps
    span_s = _span_s(value) if isinstance(value, str) and steps is None else None
    if span_s is None or span_s < 1:
        raise NotAllowed('must be a number of steps, a time like "5min" (at least 1s), or "auto"')
    return f"{span_s:g}s"


def resume_from(value: Any) -> int | str:
    """Accept "auto", "fresh", the step of a checkpoint, or the address of another job."""
    if value in ("auto", "fresh"):
        return str(value)
    step = _whole(value)
    if step is not None and step >= 0:
        return step
    if isinstance(value, str) and ("/" in value or "://" in value):
        return value
    raise NotAllowed('must be "auto", "fresh", a step number, or the address of a checkpoint')


def signals(value: Any) -> tuple[str, ...]:
    """Accept signal names ("SIGUSR1", "usr1") or numbers; kept as names."""
    items = value.split(",") if isinstance(value, str) else value
    if isinstance(items, (int, signal.Signals)):
        items = [items]
    if not isinstance(items, (list, tuple)):
        raise NotAllowed('must be a list of signal names, such as ["SIGTERM", "SIGUSR1"]')
    return tuple(dict.fromkeys(_signal_name(item) for item in items))


def _signal_name(item: Any) -> str:
    number = _whole(item)
    word = str(item).strip().upper()
    try:
        found = signal.Signals(number) if number is not None else _signal_named(word)
    except (ValueError, KeyError):
        raise NotAllowed(f"must be signal names; there is no {item}") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise NotAllowed(f"cannot hold {found.name}, which no process can catch")
    return found.name


def _signal_named(word: str) -> signal.Signals:
    return signal.Signals[word if word.startswith("SIG") else "SIG" + word]


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
        return int(value)
    if not isinstance(value, (str, float)) and hasattr(value, "__index__"):
        return int(value.__index__())
    return None


_UNITS_S = {"ms": 0.001, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _span_s(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if value == value and abs(value) < 1e12 else None
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value) if isinstance(value, str) else None
    )
    if match is None or (match[2] and match[2] not in _UNITS_S):
        return None
    return float(match[1]) * _UNITS_S.get(match[2], 1.0)


def _either(words: tuple[str, ...]) -> str:
    quoted = [f'"{word}"' for word in words]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]


FIELDS: tuple[Field, ...] = (
    Field("job", optional(name), "NAME", "Job"),
    Field("checkpoint", optional(path), "DIR", "Job"),
    Field("remote", optional(address), "URL", "Job"),
    Field("resume", resume_from, "auto|fresh|STEP|URL", "Job"),
    Field("seed", integer(0, 2**63 - 1), "N", "Job"),
    Field("nproc", optional(integer(1, 1024), "auto"), "N|auto", "World", unset="auto"),
    Field("nodes", node_range, "MIN:MAX", "World"),
    Field("spares", integer(0, 1024), "N", "World"),
    Field("respawn", switch, "", "World"),
    Field("etcd", endpoints, "HOST:PORT,...", "World"),
    Field("node", optional(name), "NAME", "World"),
    Field("bind", host, "HOST", "World"),
    Field("advertise", optional(host), "HOST", "World"),
    Field("virtual_ranks", optional(integer(1, 65536), "auto"), "N|auto", "Step", unset="auto"),
    Field("balance", switch, "", "Step"),
    Field("accumulate", integer(1, 65536), "N", "Step"),
    Field("segments", or_word("parameter", integer(1, 65536)), "N|parameter", "Step"),
    Field("replicas", integer(1, 8), "N", "Step"),
    Field("threads", integer(1, 1024), "N", "Step"),
    Field("reduction", choice("exact", "fast"), "exact|fast", "Step", not_yet=("fast",)),
    Field("overlap", switch, "", "Step"),
    Field("backend", choice("gloo", "nccl"), "gloo|nccl", "Step"),
    Field(
        "save_every", optional(save_interval), "STEPS|TIME|auto", "Checkpoints", not_yet=("auto",)
    ),
    Field("keep", optional(integer(1)), "N", "Checkpoints", not_yet=(ANY,)),
    Field(
        "stage",
        choice("primary", "holders"),
        "primary|holders",
        "Checkpoints",
        not_yet=("holders",),
    ),
    Field("when_busy", choice("skip", "wait"), "skip|wait", "Checkpoints", not_yet=("wait",)),
    Field("on_save_error", choice("warn", "fail"), "warn|fail", "Checkpoints"),
    Field("lease_ttl_s", seconds(2.0), "SECONDS", "Failures"),
    Field("hang_timeout_s", or_word("auto", seconds(0.1)), "SECONDS|auto", "Failures"),
    Field("slow_timeout_s", seconds(1.0), "SECONDS", "Failures"),
    Field("min_wait_s", seconds(0.0), "SECONDS", "Failures"),
    Field("below_min_timeout_s", seconds(0.0), "SECONDS", "Failures"),
    Field("max_failures", integer(0), "N", "Failures"),
    Field("max_reshapes", integer(0), "N", "Failures"),
    Field("max_nonfinite_steps", integer(0), "N", "Failures"),
    Field("guard_every", integer(0), "STEPS", "Failures"),
    Field("grace_s", seconds(0.0), "SECONDS", "Leaving"),
    Field("notice_signals", signals, "SIGNAL,...", "Leaving"),
    Field("log_dir", optional(path), "DIR", "Looking"),
    Field("console", choice("auto", "live", "plain", "off"), "auto|live|plain|off", "Looking"),
    Field("metrics_port", optional(integer(0, 65535)), "PORT", "Looking"),
    Field("debug", switch, "", "Looking"),
)

BY_NAME: dict[str, Field] = {field.name: field for field in FIELDS}
BY_ENV: dict[str, Field] = {field.env: field for field in FIELDS}
