"""Workers for tests of the agent: they speak its protocol and train nothing (no torch).

Each is an entry for the fork server: `function(spec, control_sock, progress_fd, arena_fd)`. What a
test wants of them comes in `spec["script"]`. A "step" is 20 ms; its number is the time since the
first World, so that workers agree without talking to each other.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

from ckpt.frames import recv_frame, send_frame
from elastic.agent.progress import ProgressPage, WorkerPhase

STEP_S = 0.02


class Trainer:
    """Follows Worlds, counts steps, stops and finishes when told."""

    def __init__(self, spec, control, progress_fd, arena_fd):
        self.spec = spec
        self.wish = spec["script"]
        self.control = control
        self.page = ProgressPage(progress_fd)
        self.arena_fd = arena_fd
        self.world = None
        self.began_s = 0.0
        self.step = 0
        self.stopping = False
        self.finished = False

    def say(self, what, **fields):
        send_frame(self.control, {"t": what, **fields})

    @property
    def generation(self):
        return 0 if self.world is None else self.world["generation"]

    def rank(self):
        ids = self.world["ids"].split(" ")
        return ids.index(self.spec["worker_id"].rpartition("-")[2])

    def run(self):
        sys.stdout.write(f"worker {self.spec['worker_id']} says hello\n")
        self.page.write(phase=WorkerPhase.WAITING)
        self.say("ready", layout="none")
        while True:
            ready, _, _ = select.select([self.control], [], [], STEP_S)
            if ready:
                try:
                    message, _ = recv_frame(self.control)
                except EOFError:
                    os._exit(7)
                if self.take(message):
                    return
            elif self.world is not None and not self.finished:
                self.work()

    def take(self, message):
        match message["t"]:
            case "world":
                self.world = message["world"]
                self.began_s = self.began_s or time.monotonic()
                self.page.write(
                    phase=WorkerPhase.COMPUTE, step=self.step + 1, generation=self.generation
                )
                self.say("formed", generation=self.generation, step=self.step)
                if self.finished:
                    self.say_finished()
            case "stop":
                self.stopping = True
            case "finish" | "exit":
                return True
        return False

    def work(self):
        if os.path.exists(self.wish.get("pause_while", "")):
            return  # as in a collective that lacks somebody
        self.step += 1
        self.page.write(
            phase=WorkerPhase.COMPUTE,
            step=self.step + 1,
            committed=self.step,
            generation=self.generation,
        )
        self.on_step()
        if self.stopping or self.step >= self.wish.get("steps", 10**9):
            self.finished = True
            self.page.write(phase=WorkerPhase.FINISHED)
            self.say_finished()

    def on_step(self):
        fail_at = self.wish.get("fail_at")
        if fail_at is not None and self.step == fail_at:
            self.say(
                "failed",
                error="ValueError",
                message=self.wish.get("message", "the marker text"),
                traceback="Traceback: the marker text",
                step=fail_at,
                virtual_rank=None,
                kind=self.wish.get("kind", "user"),
            )
            os._exit(1)

    def say_finished(self):
        value = {"answer": 42} if self.rank() == 0 else None
        self.say("finished", value=value, step=self.step, generation=self.generation)


def train(spec, control, progress_fd, arena_fd):
    Trainer(spec, control, progress_fd, arena_fd).run()


def never_ready(spec, control, progress_fd, arena_fd):
    while True:
        time.sleep(60)  # sleep: a worker that does nothing


def dies_at_once(spec, control, progress_fd, arena_fd):
    os._exit(3)


def raises(spec, control, progress_fd, arena_fd):
    raise RuntimeError("raised in the entry")


def with_child(spec, control, progress_fd, arena_fd):
    """Leave a child in the own group and one in a session of its own behind."""
    code = "import time; time.sleep(300)"
    subprocess.Popen([sys.executable, "-S", "-c", code])
    subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    train(spec, control, progress_fd, arena_fd)


def stubborn(spec, control, progress_fd, arena_fd):
    """Never end after an agreed step."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    class Stubborn(Trainer):
        def take(self, message):
            return message["t"] not in ("stop", "finish") and super().take(message)

    Stubborn(spec, control, progress_fd, arena_fd).run()


def report(spec, control, progress_fd, arena_fd):
    """Tell what a worker finds around itself, then end."""
    send_frame(
        control,
        {
            "t": "report",
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "pgid": os.getpgid(0),
            "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
            "kept": sorted([control.fileno(), progress_fd, arena_fd]),
            "threads": len(os.listdir("/proc/self/task")),
            "modules": sorted(set(sys.modules) & {"torch", "numpy", "grpc", "aiohttp"}),
            "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_DFL,
        },
    )
    sys.stdout.write("written to the log\n")
    sys.stderr.write("an error line\n")


class Saver(Trainer):
    """Stages eight rows of a tensor, shared out by rank, every `save_every` steps and at the end.

    All parts must be of one step; `save_as` fixes its number.
    """

    ROWS = 8

    def __init__(self, *arguments):
        super().__init__(*arguments)
        from ckpt.arena import Arena

        self.arena = Arena(self.arena_fd, 1 << 20)
        self.staged = []
        self.done = []

    def take(self, message):
        match message["t"]:
            case "half_free":
                self.arena.release(message["half"])
            case "save":
                self.stage()
            case "save_done":
                self.done.append(message)
        return super().take(message)

    def on_step(self):
        super().on_step()
        for step, generation in self.staged:
            self.say("committed", step=step, generation=generation)
        self.staged = []
        # Saves happen at times that all workers agree on without talking: multiples of the step.
        if self.step % self.wish.get("save_every", 10**9) == 0:
            self.stage()
        if self.stopping:
            self.stage()

    def stage(self):
        import numpy as np

        from ckpt.slices import TensorSlice

        size = len(self.world["ids"].split(" "))
        rank = self.rank()
        share = range(rank * self.ROWS // size, (rank + 1) * self.ROWS // size)
        step = self.wish.get("save_as", self.step)
        pieces = [
            (
                TensorSlice(name="w", dtype="float32", shape=(8, 4), start=row, stop=row + 1),
                memoryview(np.full(4, row, dtype=np.float32)).cast("B"),
            )
            for row in share
        ]
        lineage = [[self.generation, 0]]
        segments = list(share)
        half = self.arena.stage(
            step=step,
            generation=self.generation,
            pieces=pieces,
            extra={"step": step},
            segments=segments,
            num_segments=self.ROWS,
            lineage=lineage,
        )
        if half is None or self.wish.get("dies_staging") == rank:
            return
        self.say(
            "staged",
            step=step,
            generation=self.generation,
            half=half,
            bytes=64,
            segments=segments,
            num_segments=self.ROWS,
            lineage=lineage,
        )
        self.staged.append((step, self.generation))

    def say_finished(self):
        for step, generation in self.staged:
            self.say("committed", step=step, generation=generation)
        super().say_finished()


def save(spec, control, progress_fd, arena_fd):
    Saver(spec, control, progress_fd, arena_fd).run()
