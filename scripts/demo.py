"""The whole way once: train real text through a kill, save, and restore at another world size.

    make demo          (or: python scripts/demo.py [--out DIR] [--tiny])

1. four workers train a small GPT on the text of the installed Python; in mid-run worker 1 gets
   SIGKILL; the others go on, it comes back; every now and then a checkpoint goes to the local
   directory and to an S3-compatible server on this machine
2. the local directory is deleted; new processes, two workers this time, restore the last
   checkpoint from S3 alone and train on
3. the same training once more, from the start and undisturbed; then every bit is compared

It ends with a short report here, report.html and report.json in the directory. Exit code 1: a
promise was not kept; 7: something it needs did not work. All that it starts ends with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from importlib import metadata
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chaos.s3_server import S3Server
from ckpt import CheckpointError
from elastic.errors import ElasticError
from scripts.compare_checkpoints import Comparison, compare
from scripts.demo_report import Plan, Seen, tell
from scripts.demo_show import Show, complain, summary
from scripts.programs import ROOT, ProgramFailed, commit_of, signals_raise
from scripts.report_page import render
from scripts.run_facts import Fault, measure
from scripts.runs import Run

FULL = Plan(
    size="demo",
    batch_size=2,  # three trainings in three minutes on two cores
    workers=4,
    virtual_ranks=8,
    first_steps=150,
    more_steps=30,
    restored_workers=2,
    save_every=50,
    kill_after=70,
    loss_below=2.4,
)
TINY = Plan(
    size="tiny",
    batch_size=8,
    workers=4,
    virtual_ranks=8,
    first_steps=40,
    more_steps=10,
    restored_workers=2,
    save_every=20,
    kill_after=14,
    loss_below=5.0,
)
VICTIM_SLOT = 1
BUCKET = "everstep-demo"
MADE_BY_US = ("ckpt", "undisturbed", "runs", "s3", "report.html", "report.json")
NOT_KEPT = 1
INFRASTRUCTURE = 7
START_TIMEOUT_S = 120.0
PART_TIMEOUT_S = 600.0
RECOVERY_TIMEOUT_S = 60.0


class Demo:
    """One run of the demo in one directory."""

    def __init__(self, plan: Plan, out: Path, server: S3Server, show: Show) -> None:
        self.plan = plan
        self.out = out
        self.server = server
        self.show = show
        self.remote = f"s3://{BUCKET}/demo"
        self.local = out / "ckpt"
        self.undisturbed = out / "undisturbed"

    def all_parts(self) -> Seen:
        """Run everything and return what there was to see."""
        first, fault = self.first_part()
        second, bytes_from_s3 = self.second_part()
        undisturbed = self.undisturbed_run()
        return Seen(
            first=first,
            second=second,
            undisturbed=undisturbed,
            faults=[fault],
            comparisons=self.comparisons(),
            bytes_from_s3=bytes_from_s3,
        )

    def first_part(self) -> tuple[list[dict[str, object]], Fault]:
        """Train with a kill in the middle."""
        plan, show = self.plan, self.show
        size = f"{plan.workers} workers, {plan.virtual_ranks} virtual ranks"
        show.chapter(f"1. Train with {size}, and kill one of them")
        with self._run("with a kill", plan.workers, plan.first_steps, remote=True) as run:

            def follow(new: list[dict[str, object]]) -> None:
                show.follow(run, new)

            run.until(
                lambda: run.step >= plan.kill_after,
                within_s=START_TIMEOUT_S + PART_TIMEOUT_S,
                what=f"step {plan.kill_after}",
                on_events=follow,
            )
            victim = run.worker_in(VICTIM_SLOT)
            if victim is None:
                raise ProgramFailed(f"no worker of the World has slot {VICTIM_SLOT}")
            show.fault = fault = run.signal(victim, signal.SIGKILL)
            show.say(f"[bold red]SIGKILL[/] to worker {VICTIM_SLOT} (pid {fault.pid})")
            found = run.until(
                lambda: measure(run.events, fault),
                within_s=RECOVERY_TIMEOUT_S,
                what="the recovery",
                on_events=follow,
            )
            show.recovered(found)
            run.until(
                lambda: run.is_whole(plan.workers),
                within_s=RECOVERY_TIMEOUT_S,
                what=f"a World of {plan.workers} workers",
                on_events=follow,
            )
            show.say(f"[green]back[/] at {plan.workers} workers")
            show.fault = None
            run.until_done(within_s=PART_TIMEOUT_S, on_events=follow)
            return list(run.events), fault

    def second_part(self) -> tuple[list[dict[str, object]], int]:
        """Restore from S3 alone with fewer workers, and train on."""
        plan, show = self.plan, self.show
        workers = f"{plan.restored_workers} workers"
        show.chapter(f"2. Delete the local copy; restore from S3 alone with {workers}")
        shutil.rmtree(self.local)
        show.say(f"{self.local} is deleted; no process of the first part is left")
        before = self.server.bytes_sent(BUCKET)
        counted: list[int] = []
        with self._run("restored", plan.restored_workers, plan.all_steps, remote=True) as run:

            def follow(new: list[dict[str, object]]) -> None:
                show.follow(run, new)
                done = [r for r in run.events if r["event"] == "restore.finished"]
                if not counted and len(done) == plan.restored_workers:
                    counted.append(self.server.bytes_sent(BUCKET) - before)
                    show.say(f"the S3 server has sent {counted[0] / 1e6:.1f} MB")

            run.until_done(within_s=START_TIMEOUT_S + PART_TIMEOUT_S, on_events=follow)
            return list(run.events), counted[0] if counted else 0

    def undisturbed_run(self) -> list[dict[str, object]]:
        """Train the same from the start, without anything in the way."""
        show = self.show
        show.chapter("3. The same training undisturbed, in its own processes")
        with self._run("undisturbed", self.plan.workers, self.plan.all_steps, remote=False) as run:
            run.until_done(
                within_s=START_TIMEOUT_S + PART_TIMEOUT_S,
                on_events=lambda new: show.follow(run, new),
            )
            return list(run.events)

    def comparisons(self) -> list[tuple[str, Comparison]]:
        """Compare with the undisturbed run where the first part ended, and at the end."""
        plan = self.plan
        return [
            (what, compare(self.remote, str(self.undisturbed), step=step))
            for what, step in (
                (f"{plan.workers} workers, one of them killed", plan.first_steps),
                (f"after the restore with {plan.restored_workers}", plan.all_steps),
            )
        ]

    def _run(self, name: str, workers: int, steps: int, *, remote: bool) -> Run:
        self.show.begin(name, steps)
        command = [sys.executable, str(ROOT / "train" / "gpt.py")]
        command += ["--size", self.plan.size, "--steps", str(steps)]
        command += ["--batch-size", str(self.plan.batch_size)]
        command += ["--decay-steps", str(self.plan.all_steps)]  # one schedule for all parts
        settings: dict[str, object] = {
            "job": "demo" if remote else "demo-undisturbed",
            "checkpoint": self.local if remote else self.undisturbed,
            "nproc": workers,
            "virtual_ranks": self.plan.virtual_ranks,
            "threads": 1,
            "save_every": self.plan.save_every,
            "console": "off",
        }
        if remote:
            settings["remote"] = self.remote
        log_dir = self.out / "runs" / name.replace(" ", "-")
        return Run(f"the run {name!r}", command, log_dir=log_dir, settings=settings)


def make_report(plan: Plan, out: Path, show: Show) -> list[str]:
    """Run the demo and write its report; returns the broken promises."""
    began_s = time.monotonic()
    for name in MADE_BY_US:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with S3Server(out / "s3") as server:
            server.create_bucket(BUCKET)
            os.environ.update(server.client_environment())
            seen = Demo(plan, out, server, show).all_parts()
    finally:
        shutil.rmtree(out / "s3", ignore_errors=True)
    story = tell(
        plan,
        seen,
        {
            "command": "scripts/demo.py" + (" --tiny" if plan is TINY else ""),
            "commit": commit_of(),
            "torch": metadata.version("torch"),
            "cpu_count": os.cpu_count(),
            "duration_s": round(time.monotonic() - began_s, 1),
        },
    )
    (out / "report.json").write_text(json.dumps(story.report, indent=2) + "\n")
    (out / "report.html").write_text(render(story))
    show.chapter("Report")
    show.console.print(summary(story.report))
    show.say(f"\n  {out / 'report.html'}\n  {out / 'report.json'}")
    return list(story.report["broken_promises"])


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "build" / "demo")
@click.option("--tiny", is_flag=True, help="The smallest variant, for tests: seconds, not minutes.")
def main(out: Path, *, tiny: bool) -> None:
    """Train through a kill, save, restore from S3 at another world size, and compare every bit."""
    with signals_raise():
        try:
            with Show() as show:
                broken = make_report(TINY if tiny else FULL, out.absolute(), show)
        except (ProgramFailed, ElasticError, CheckpointError, OSError) as error:
            complain(str(error))
            sys.exit(INFRASTRUCTURE)
        except KeyboardInterrupt:
            complain("interrupted; everything it started has ended")
            sys.exit(130)
    if broken:
        complain(f"a promise was not kept: {'; '.join(broken)}")
        sys.exit(NOT_KEPT)


if __name__ == "__main__":
    main()
