"""One worker of the peers of `bench.py step`: DistributedDataParallel, with AdamW or with ZeRO.

Started by torchrun with PEER_* in the environment. It computes the same micro-batches as a worker
of ours with an even share: all but the last without a synchronisation, so that gradients travel
once per step. The loss is divided by their number, so the step is that of the whole batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
if os.getppid() == 1:
    sys.exit(1)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402 - after the process is tied to its parent
import torch.distributed as dist  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402

from scripts.bench_model import BATCH, LEARNING_RATE, loss_of, make_model, sample  # noqa: E402
from scripts.bench_turns import Turn  # noqa: E402


def main() -> None:
    """Train so many steps, in turns with the others."""
    name, directory = os.environ["PEER_NAME"], os.environ["PEER_DIRECTORY"]
    steps, virtual_ranks = int(os.environ["PEER_STEPS"]), int(os.environ["PEER_VIRTUAL_RANKS"])
    width, depth = int(os.environ["PEER_WIDTH"]), int(os.environ["PEER_DEPTH"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model(width, depth)
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == "zero":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE
        )
    else:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE)
    share = virtual_ranks // size
    turn = Turn(directory, name, rank)
    for step in range(steps):
        turn.step()
        for number in range(share):
            first = ((step * virtual_ranks) + rank * share + number) * BATCH
            x = torch.stack([sample(first + i, width) for i in range(BATCH)])
            last = number == share - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                (loss_of(ddp(x)) / share).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    turn.last(peak_kb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
