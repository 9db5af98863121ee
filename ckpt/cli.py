"""`ckpt ls | show | verify | gc URL`: look at checkpoints from a bare shell.

Needs no running job, no torch and no GPU. Exit codes: 0 done, 1 something is bad, 2 the question
cannot be answered as it was asked, 6 the store failed. Errors are one sentence on standard error;
`--debug` adds the traceback. Endpoint and keys of an object store come from its usual environment
and files.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.errors import CheckpointError, Corrupt, Misconfigured, NotFound

if TYPE_CHECKING:
    from ckpt.discover import Found
    from ckpt.manifest import Manifest
    from ckpt.tier import Tier

__all__ = ["main"]

BAD, ASKED_WRONG, STORE_FAILED = 1, 2, 6


class _Commands(click.Group):
    """A group that turns our errors into a sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CheckpointError as error:
            if ctx.meta.get("ckpt.debug"):
                raise
            click.echo(f"ckpt: {error}", err=True)
            ctx.exit(_exit_code(error))


def _debug(function: Callable[..., Any]) -> Callable[..., Any]:
    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
        if value:
            ctx.meta["ckpt.debug"] = True

    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Show the traceback of an error.",
    )(function)


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_step = click.option("--step", type=click.IntRange(min=0), help="Only the checkpoint of this step.")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@_debug
@click.version_option(package_name="everstep", message="%(version)s")
def main() -> None:
    """Look at checkpoints in a directory or at any fsspec URL, e.g. s3://bucket/job."""


@main.command("ls")
@click.argument("url")
@_as_json
@_debug
def ls(url: str, as_json: bool) -> None:  # noqa: FBT001
    """List the checkpoints at URL, oldest first."""
    from ckpt.discover import survey

    with _tier(url) as tier:
        found = survey(tier)
    if as_json:
        _print_json({"url": url, "checkpoints": [_row(each, found) for each in found]})
        return
    if not found:
        click.echo(f"there is no checkpoint in {url}")
        return
    table = [("STEP", "GENERATION", "PACKS", "SIZE", "STATE")]
    for each in found:
        row = _row(each, found)
        size = "-" if row["bytes"] is None else _human(row["bytes"])
        packs = "-" if row["packs"] is None else str(row["packs"])
        values = "  ".join(f"{name} {value:.6g}" for name, value in row["values"].items())
        state = f"{row['state']}  {values}".rstrip()
        table.append((str(each.step), str(each.generation), packs, size, state))
    widths = [max(len(row[i]) for row in table) for i in range(5)]
    for line in table:
        cells = [line[i].rjust(widths[i]) for i in range(4)]
        click.echo("  ".join([*cells, line[4]]))


@main.command("show")
@click.argument("url")
@_step
@_as_json
@_debug
def show(url: str, step: int | None, as_json: bool) -> None:  # noqa: FBT001
    """Show what the newest checkpoint at URL (or that of --step) holds."""
    from ckpt.opening import open_checkpoint

    with _tier(url):
        pass
    with open_checkpoint(url, step) as checkpoint:
        tensors, manifest = checkpoint.tensors, checkpoint.manifest
    body = {
        "url": url,
        "job": manifest.job,
        "step": manifest.step,
        "generation": manifest.generation,
        "lineage": [list(pair) for pair in manifest.lineage],
        "num_segments": manifest.num_segments,
        "bytes": manifest.nbytes,
        "packs": [
            {"object": p.object, "node": p.node, "bytes": p.size, "segments": list(p.segments)}
            for p in manifest.packs
        ],
        "tensors": {
            name: {"dtype": info.dtype, "shape": list(info.shape), "bytes": info.nbytes}
            for name, info in tensors.items()
        },
        "extra": manifest.extra,
    }
    if as_json:
        _print_json(body)
        return
    click.echo(
        f"job {manifest.job}, step {manifest.step}, generation {manifest.generation}: "
        f"{len(tensors)} tensors in {len(manifest.packs)} packs, {_human(manifest.nbytes)}"
    )
    for name, info in tensors.items():
        shape = "x".join(map(str, info.shape)) or "scalar"
        click.echo(f"  {name}  {info.dtype}  {shape}  {_human(info.nbytes)}")
    if manifest.extra:
        click.echo(f"  and plain values: {', '.join(manifest.extra)}")


@main.command("verify")
@click.argument("url")
@_step
@_as_json
@_debug
def verify(url: str, step: int | None, as_json: bool) -> None:  # noqa: FBT001
    """Read every byte of the checkpoints at URL; exit with 1 if one is damaged."""
    from ckpt.discover import survey
    from ckpt.verify import strays, verify_checkpoint

    with _tier(url) as tier:
        found = [f for f in survey(tier) if f.committed and step in (None, f.step)]
        if not found:
            what = "checkpoint" if step is None else f"committed checkpoint of step {step}"
            raise NotFound(f"there is no {what} in {url}", kind="not-found")
        results = []
        total = sum(f.manifest.nbytes for f in found if f.manifest is not None)
        with _progress(total, quiet=as_json) as advance:
            for each in found:
                row = _row(each, found)
                if each.manifest is None:
                    row["damage"] = [{"object": "manifest.json", "problem": each.problem}]
                    row["strays"] = []
                else:
                    damage = verify_checkpoint(tier, each.manifest, advance)
                    row["damage"] = [_plain_damage(d) for d in damage]
                    row["strays"] = strays(tier, each.manifest)
                row["ok"] = not row["damage"]
                results.append(row)
    good = all(row["ok"] for row in results)
    if as_json:
        _print_json({"url": url, "ok": good, "bytes": total, "checkpoints": results})
    else:
        for row in results:
            _print_verdict(row)
    if not good:
        sys.exit(BAD)


@main.command("gc")
@click.argument("url")
@_as_json
@_debug
def gc(url: str, as_json: bool) -> None:  # noqa: FBT001
    """List what lies at URL and belongs to no checkpoint. Deletes nothing."""
    from ckpt.discover import survey

    with _tier(url) as tier:
        left = [name for each in survey(tier) for name in _leftovers(tier, each)]
        uploads: Callable[[], list[str]] | None = getattr(tier, "open_uploads", None)
        opened = [] if uploads is None else uploads()
    if as_json:
        _print_json({"url": url, "strays": left, "open_uploads": opened})
        return
    for name in left:
        click.echo(name)
    for name in opened:
        click.echo(f"{name} (an upload that was not finished)")
    if not left and not opened:
        click.echo(f"nothing lies about in {url}")


def _leftovers(tier: Tier, found: Found) -> Iterator[str]:
    from ckpt.manifest import MANIFEST_NAME, PACKS_DIR, checkpoint_dir
    from ckpt.verify import strays

    place = checkpoint_dir(found.step, found.generation)
    if found.manifest is not None:
        yield from (f"{place}/{name}" for name in strays(tier, found.manifest))
        yield from (
            f"{place}/{name}"
            for name in tier.list_dir(place)
            if name not in (MANIFEST_NAME, PACKS_DIR)
        )
    elif not found.committed:
        yield from (f"{place}/{PACKS_DIR}/{n}" for n in tier.list_dir(f"{place}/{PACKS_DIR}"))


@contextlib.contextmanager
def _tier(url: str) -> Iterator[Tier]:
    from ckpt.tier import open_tier

    tier = open_tier(url)
    try:
        root = getattr(tier, "root", None)
        if isinstance(root, Path) and not root.is_dir():
            raise NotFound(f"{url} is no directory", kind="not-found", hint="check the path")
        yield tier
    finally:
        tier.close()


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("verify"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("verify", total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def _row(found: Found, found_all: Sequence[Found]) -> dict[str, Any]:
    manifest: Manifest | None = found.manifest
    if not found.committed:
        state = "not committed"
    elif manifest is None:
        state = "damaged manifest"
    else:
        state = "usable" if found.current else "abandoned by a later generation"
    return {
        "step": found.step,
        "generation": found.generation,
        "state": state,
        "packs": None if manifest is None else len(manifest.packs),
        "bytes": None if manifest is None else manifest.nbytes,
        "job": None if manifest is None else manifest.job,
        "values": {} if manifest is None else _values_at(manifest.step, found_all),
    }


def _values_at(step: int, found_all: Sequence[Found]) -> dict[str, float]:
    """Return what a training run logged for a step and found when it evaluated there.

    An evaluation may be made after its step was saved: then a later checkpoint knows of it.
    """
    values: dict[str, float] = {}
    for each in found_all:
        extra = {} if each.manifest is None else each.manifest.extra
        if each.step == step:
            values.update(extra.get("log", {}))
        for evaluation in extra.get("evaluations", ()):
            if evaluation["step"] == step:
                values.update(evaluation["values"])
    return values


def _plain_damage(damage: Any) -> dict[str, Any]:
    return {
        "object": damage.object,
        "problem": damage.problem,
        "start": damage.start,
        "stop": damage.stop,
        "tensor": damage.tensor,
    }


def _print_verdict(row: dict[str, Any]) -> None:
    verdict = "ok" if row["ok"] else "DAMAGED"
    size = "" if row["bytes"] is None else f", {_human(row['bytes'])}"
    click.echo(f"step {row['step']}, generation {row['generation']}{size}: {verdict}")
    for damage in row["damage"]:
        span = f" bytes [{damage['start']}, {damage['stop']})" if damage.get("stop") else ""
        tensor = f" ({damage['tensor']})" if damage.get("tensor") else ""
        click.echo(f"  {damage['object']}{span}{tensor}: {damage['problem']}")
    for name in row["strays"]:
        click.echo(f"  {name}: not part of this checkpoint, ignored")


def _human(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def _exit_code(error: CheckpointError) -> int:
    if isinstance(error, Misconfigured | NotFound):
        return ASKED_WRONG
    return BAD if isinstance(error, Corrupt) else STORE_FAILED


if __name__ == "__main__":
    main()
