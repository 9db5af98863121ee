"""One worker of the torchrun peer: plain DistributedDataParallel that goes on from its last save.

Started by torchrun. Rank 0 saves model and optimizer after every step into one of two files by
turns, then marks which one is whole, so that a kill in the middle of a save costs one step at most.
Each rank appends a line for its start and one for each completed step, stamped with
CLOCK_MONOTONIC. It ends when its torchrun ends, however that ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

STARTED_S = time.monotonic()
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel end this process when torchrun does."""
    parent_pid = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid == 1 or os.getppid() != parent_pid:
        sys.exit(1)


end_with_parent()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402 - after the process is tied to its parent
import torch.distributed as dist  # noqa: E402

from scripts.bench_model import BATCH, loss_of, make_model, make_optimizer, sample  # noqa: E402

IMPORTED_S = time.monotonic()


class Saves:
    """Two files used by turns, and one byte that names the whole one (0: none yet)."""

    def __init__(self, paths: list[str], mark_path: str) -> None:
        self._paths = paths
        self._mark_path = mark_path

    def load(self) -> dict[str, object] | None:
        """Return the last whole save."""
        with open(self._mark_path, "rb") as file:
            mark = file.read(1)
        if mark in (b"", b"\0"):
            return None
        found: dict[str, object] = torch.load(self._paths[mark[0] - 1], weights_only=True)
        return found

    def save(self, state: dict[str, object], step: int) -> None:
        """Write a save and then mark it."""
        turn = step % 2
        torch.save(state, self._paths[turn])
        with open(self._mark_path, "r+b") as file:
            file.write(bytes([turn + 1]))


def main() -> None:
    """Train until somebody ends this process."""
    width, depth = int(os.environ["PEER_WIDTH"]), int(os.environ["PEER_DEPTH"])
    saves = Saves(os.environ["PEER_SAVES"].split(os.pathsep), os.environ["PEER_MARK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    grouped_s = time.monotonic()
    model = make_model(width, depth)
    optimizer = make_optimizer(model)
    step = 0
    saved = saves.load()
    if saved is not None:
        model.load_state_dict(saved["model"])  # type: ignore[arg-type]
        optimizer.load_state_dict(saved["optimizer"])  # type: ignore[arg-type]
        step = int(saved["step"])  # type: ignore[call-overload]
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    loaded_s = time.monotonic()
    with open(os.environ["PEER_LOG"], "a", buffering=1) as log:

        def tell(event: str, **fields: object) -> None:
            line = {"event": event, "t_mono_s": time.monotonic(), "rank": rank, "pid": os.getpid()}
            log.write(json.dumps({**line, "size": size, **fields}) + "\n")

        tell(
            "start",
            began_s=STARTED_S,
            import_s=IMPORTED_S - STARTED_S,
            group_s=grouped_s - IMPORTED_S,
            load_s=loaded_s - grouped_s,
            step=step,
        )
        while True:
            began_s = time.monotonic()
            first = (step * size + rank) * BATCH
            x = torch.stack([sample(first + i, width) for i in range(BATCH)])
            optimizer.zero_grad()
            loss_of(ddp(x)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            tell("step", step=step, duration_s=time.monotonic() - began_s)
            if rank == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                saves.save(state, step)


if __name__ == "__main__":
    main()
