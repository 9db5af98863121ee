"""Reads the state of held segments from a checkpoint, by exactly the rows that are needed.

One worker (the first rank) chooses the checkpoint and tells the others, so that no two workers
can look at a store at different moments and disagree. Each primary reads its own rows; what else
a worker needs comes from its peers.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch

import ckpt
from elastic.agent.progress import WorkerPhase
from elastic.errors import Misconfigured
from elastic.step.layout import dtype_name
from elastic.step.saving import PLAIN_STATE, as_bytes, optimizer_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic.step.driver import Driver
    from elastic.step.extras import Extras
    from elastic.step.segments import Piece


class Restorer:
    """Restores a driver from the newest checkpoint of its job, or from a named one.

    Args:
        roots: where to look, nearest first.
        resume: "auto", "fresh", a step, or the URL of another job's checkpoints.
        first: True when the job has had no World yet in this run.
    """

    def __init__(
        self,
        driver: Driver,
        extras: Extras,
        *,
        roots: Sequence[str],
        resume: str | int,
        first: bool,
    ) -> None:
        self._driver = driver
        self._extras = extras
        self._roots = list(roots)
        self._resume = resume
        self._first = first
        self._checkpoint: Any = None
        self._state_names: dict[str, list[str]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._states: list[tuple[int, int, list[dict[str, Any]]]] = []
        self._read_s = 0.0
        self._damaged: int | None = None
        self.restored_step = 0

    def choose(self) -> bytes:
        """Find the checkpoint to begin from; called on the first rank only.

        After a checkpoint turned out to be damaged, an older one is chosen.
        """
        if self._damaged is not None:
            older = ckpt.open_latest(self._roots, before=self._damaged)
            return self._answer(self._roots, older)
        if self._resume == "fresh" and self._first:
            return b""
        roots, step = self._roots, None
        if self._first and isinstance(self._resume, int):
            step = self._resume
        elif self._first and self._resume not in ("auto", "fresh"):
            roots = [str(self._resume)]
        if not roots:
            return b""
        checkpoint = ckpt.open_latest(roots) if step is None else _open_step(roots, step)
        if checkpoint is None:
            if step is not None or roots is not self._roots:
                raise Misconfigured(
                    f"resume={self._resume}: no whole checkpoint there ({', '.join(roots)})",
                    hint="list what there is with `ckpt ls`",
                )
            return b""
        return self._answer(roots, checkpoint)

    @staticmethod
    def _answer(roots: Sequence[str], checkpoint: Any) -> bytes:
        if checkpoint is None:
            return b""
        return json.dumps(
            {"roots": roots, "step": checkpoint.step, "generation": checkpoint.generation}
        ).encode()

    def accept(self, answer: bytes) -> bool:
        """Open what the first rank chose; False when the job starts from initial values."""
        if not answer:
            return False
        chosen = json.loads(answer)
        self._driver.events.emit("restore.started", source=", ".join(chosen["roots"]))
        self._checkpoint = ckpt.open_latest(
            chosen["roots"], step=chosen["step"], generation=chosen["generation"]
        )
        if self._checkpoint is None:
            raise Misconfigured(
                f"the checkpoint of step {chosen['step']} is not readable from this worker",
                hint="all hosts must reach the remote tier or share the checkpoint directory",
            )
        return True

    def read(self, segments: Sequence[int]) -> str:
        """Read the rows and optimizer state of these held segments.

        Returns what is wrong with the checkpoint, "" if nothing is. Then `install` makes it count,
        or the first rank chooses an older one.
        """
        driver = self._driver
        checkpoint = self._checkpoint
        assert checkpoint is not None
        assert driver.layout is not None
        driver.phase(WorkerPhase.RESTORE)
        began_s = time.monotonic()
        self._check_same_model(checkpoint)
        self._state_names = self._index_state(checkpoint)
        requests: list[tuple[str, int, int, memoryview]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        states: list[tuple[int, int, list[dict[str, Any]]]] = []
        layout = driver.layout
        for segment in segments:
            if segment == layout.num_trainable:
                for entry in layout.constant:
                    self._want(
                        requests, copies, entry.name, 0, entry.rows, entry.view(layout.canonical)
                    )
                continue
            for piece in layout.segments[segment].pieces:
                entry = layout.trainable[piece.param]
                view = entry.view(layout.flat, piece.start, piece.stop)
                self._want(requests, copies, entry.name, piece.start, piece.stop, view)
            for index, optimizer in enumerate(driver.optimizers):
                prefix = optimizer_prefix(index, len(driver.optimizers))
                found = [
                    self._state(checkpoint, prefix, piece, requests, copies)
                    for piece, _ in optimizer.export_state(segment)
                ]
                states.append((index, segment, found))
        try:
            checkpoint.read_into(requests)
        except (ckpt.Corrupt, ckpt.NotFound) as error:
            self._damaged = checkpoint.step
            return str(error)
        self._copies, self._states, self._read_s = copies, states, time.monotonic() - began_s
        return ""

    def reject(self, problem: str) -> None:
        """Give up the checkpoint that was read, because some worker found it damaged."""
        step = self._checkpoint.step
        self._damaged = step
        self._driver.events.emit(
            "checkpoint.failed", step=step, error=f"it cannot be restored from: {problem}"
        )

    def install(self) -> None:
        """Make what was read, and the global state that belongs to it, this worker's state."""
        driver, checkpoint = self._driver, self._checkpoint
        driver.step = checkpoint.step
        driver.seq = 0
        driver.agreement = None
        driver.after_step_done = checkpoint.step
        self._extras.install_dict(checkpoint.extra)
        driver.nonfinite_run = 0  # whoever resumes after a stop for it means to try again
        for target, source in self._copies:
            target.copy_(source)
        for index, segment, found in self._states:
            driver.optimizers[index].import_state(segment, [_finish(s) for s in found])
        self.restored_step = checkpoint.step
        driver.events.emit(
            "restore.finished",
            step=checkpoint.step,
            bytes_read=checkpoint.bytes_read,
            duration_s=self._read_s,
            report=[str(line) for line in checkpoint.report],
            source=", ".join(self._roots),
        )
        self._checkpoint = None
        self._copies, self._states = [], []

    @staticmethod
    def _want(
        requests: list[tuple[str, int, int, memoryview]],
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        name: str,
        start: int,
        stop: int,
        target: torch.Tensor,
    ) -> None:
        if target.numel() == 0:
            return
        landing = target
        if target.device.type != "cpu" or not target.is_contiguous():
            landing = torch.empty(target.shape, dtype=target.dtype)
            copies.append((target, landing))
        requests.append((name, start, stop, as_bytes(landing)))

    def _state(
        self,
        checkpoint: Any,
        prefix: str,
        piece: Piece,
        requests: list[tuple[str, int, int, memoryview]],
        copies: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> dict[str, Any]:
        driver = self._driver
        assert driver.layout is not None
        entry = driver.layout.trainable[piece.param]
        head = f"{prefix}.{entry.name}."
        state: dict[str, Any] = {}
        for name in self._state_names.get(head, ()):
            info = checkpoint.tensors[name]
            key = name.removeprefix(head)
            shape = tuple(info.shape)
            dtype = getattr(torch, info.dtype)
            if shape == entry.shape and shape:
                start, stop = piece.start, piece.stop
                shape = (stop - start, *shape[1:])
            else:
                start, stop = 0, shape[0] if shape else 1
            on_host = not shape or key == PLAIN_STATE
            target = torch.zeros(shape, dtype=dtype, device="cpu" if on_host else driver.device)
            self._want(requests, copies, name, start, stop, target)
            state[key] = target
        return state

    @staticmethod
    def _index_state(checkpoint: Any) -> dict[str, list[str]]:
        """Group the checkpoint's names by what precedes the last dot."""
        index: dict[str, list[str]] = {}
        for name in checkpoint.tensors:
            index.setdefault(name.rpartition(".")[0] + ".", []).append(name)
        return index

    def _check_same_model(self, checkpoint: Any) -> None:
        """Refuse a checkpoint of another model with one report of all differences."""
        driver = self._driver
        assert driver.layout is not None
        wanted = {
            e.name: (dtype_name(e.dtype), e.shape)
            for e in (*driver.layout.trainable, *driver.layout.constant)
        }
        stored = {
            name: (info.dtype, tuple(info.shape))
            for name, info in checkpoint.tensors.items()
            if not name.startswith("optimizer")
        }
        missing = sorted(wanted.keys() - stored.keys())
        unexpected = sorted(stored.keys() - wanted.keys())
        changed = [
            f"{name}: saved {stored[name][0]}{list(stored[name][1])}, "
            f"model {wanted[name][0]}{list(wanted[name][1])}"
            for name in sorted(wanted.keys() & stored.keys())
            if wanted[name] != stored[name]
        ]
        if not (missing or unexpected or changed):
            return
        parts = []
        if missing:
            parts.append(f"not in the checkpoint: {_some(missing)}")
        if unexpected:
            parts.append(f"only in the checkpoint: {_some(unexpected)}")
        if changed:
            parts.append(f"different: {_some(changed)}")
        raise Misconfigured(
            f"the checkpoint of step {checkpoint.step} is of another model ({'; '.join(parts)})",
            hint="use the same model, another checkpoint directory, or resume='fresh'",
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _finish(state: dict[str, Any]) -> dict[str, Any]:
    plain = state.pop(PLAIN_STATE, None)
    if plain is not None:
        state.update(json.loads(plain.numpy().tobytes()))
    return state


def _open_step(roots: Sequence[str], step: int) -> Any:
    return ckpt.open_latest(roots, step=step)
