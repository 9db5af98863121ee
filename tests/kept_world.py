"""A World of real workers that is kept up: the dead leave it, spares come in.

What agents decide with etcd between them is decided here in a few lines, so that the worst moment
for a death can be chosen by faults inside the workers (tests/faults.py).
"""

from __future__ import annotations

import contextlib
import signal
from typing import Any

from ckpt.arena import ArenaReader
from ckpt.commit import Missing, assemble, make_entry
from ckpt.frames import send_frame
from elastic.membership.messages import Mode
from tests.local_world import LocalWorld, WorkerProcess


class KeptWorld(LocalWorld):
    """A LocalWorld whose dead are replaced until all members have finished.

    Saves are answered as by a service that is never behind: done once some worker has called the
    step committed and the staged parts are a checkpoint by the rules of `ckpt`.
    """

    mode = Mode.BOUNDARY
    refill = True

    def start_with_spares(self, count: int, spares: int) -> None:
        """Form the first World of `count` workers; others are ready to come in later."""
        started = self.spawn(count) + self.spawn(spares, first=False)
        self.until(lambda: all(w.said("ready") or w.status is not None for w in started))
        self._full = count
        self._parts: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._answered: set[tuple[int, int]] = set()
        self.form(started[:count])

    def keep(self, timeout_s: float = 90.0) -> Any:
        """Answer deaths until all members have finished; return the first rank's value."""
        self.until(self._tended, timeout_s)
        members = self.members()
        for spare in [w for w in self.alive if w not in members]:
            with contextlib.suppress(OSError):
                send_frame(spare.sock, {"t": "exit"})
        return self.finish()

    def _tended(self) -> bool:
        assert self.world is not None
        members = self.members()
        living = [w for w in members if w.status is None]
        failed = [w for w in self.workers if w.said("failed")]
        assert not failed, self.describe()
        assert living, self.describe()
        generation = self.world.generation
        if len(living) < len(members):
            self.form(living)
            return False
        ended = [w for w in living if w.said("finished")]
        formed = all(any(m["generation"] == generation for m in w.said("formed")) for w in living)
        if ended and not formed and self.world.mode is Mode.BOUNDARY:
            self.form([w for w in living if any(w.said("formed"))])  # too late to come in
            return False
        missing = self._full - len(living)
        if missing and formed and not ended and self.refill:
            ready = [w for w in self.alive if w.said("ready") and w not in members]
            if ready:
                self.form([*living, *ready[:missing]], self.mode)
            return False
        return bool(living) and all(
            any(m["generation"] == generation for m in w.said("finished")) for w in living
        )

    def on_message(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """Read a staged half and free it at once; tell all when a checkpoint is whole."""
        if message["t"] == "staged":
            entry = self._entry(worker, message["half"])
            assert (entry["step"], entry["generation"]) == (message["step"], message["generation"])
            self._parts.setdefault((message["step"], message["generation"]), []).append(entry)
        super().on_message(worker, message)
        if message["t"] not in ("staged", "committed"):
            return
        committed = {
            (m["step"], m["generation"]) for w in self.workers for m in w.said("committed")
        }
        for key, parts in self._parts.items():
            step, generation = key
            if key not in committed or key in self._answered:
                continue
            # Raises Conflict when parts contradict each other or lack rows.
            if isinstance(assemble(parts, step=step, generation=generation), Missing):
                continue
            self._answered.add(key)
            told = {"t": "save_done", "step": step, "generation": generation, "ok": True}
            for other in self.alive:
                with contextlib.suppress(OSError):
                    send_frame(other.sock, told)

    def _entry(self, worker: WorkerProcess, half: int) -> dict[str, Any]:
        reader = ArenaReader(self._arena_fds[worker.slot])
        try:
            sealed = reader.sealed(half)
            assert sealed is not None, "what is said to be staged is sealed"
            footer = sealed.footer
            return make_entry(
                job="test",
                node="n",
                worker_id=worker.worker_id,
                step=sealed.step,
                generation=sealed.generation,
                object="",
                size=0,
                crc=0,
                footer_offset=0,
                footer_bytes=0,
                footer_crc=0,
                segments=footer.segments,
                num_segments=footer.num_segments,
                lineage=footer.lineage,
                extra_crc=footer.extra_crc,
                slices=footer.slices,
            )
        finally:
            reader.close()

    def killed(self) -> set[str]:
        """Return the workers that ended by SIGKILL."""
        return {
            w.worker_id for w in self.workers if w.status is not None and w.status == signal.SIGKILL
        }
