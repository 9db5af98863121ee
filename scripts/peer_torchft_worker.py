"""One worker of the torchft peer of `bench.py step`; started with PEER_* in the environment.

It computes the same micro-batches as a worker of ours with an even share.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from scripts.bench_model import BATCH, loss_of, make_model, make_optimizer, sample
from scripts.bench_turns import Turn


def main() -> None:
    """Train so many steps, in turns with the others."""
    torchft = importlib.import_module("torchft")  # in a directory of its own
    rank, size = int(os.environ["PEER_RANK"]), int(os.environ["PEER_SIZE"])
    steps, virtual_ranks = int(os.environ["PEER_STEPS"]), int(os.environ["PEER_VIRTUAL_RANKS"])
    width, depth = int(os.environ["PEER_WIDTH"]), int(os.environ["PEER_DEPTH"])
    torch.set_num_threads(1)
    tcp_store = getattr(dist, "TCPStore")  # noqa: B009 - torch does not list it
    store = tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = make_model(width, depth)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda _state: None,
        state_dict=dict,
        min_replica_size=size,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=os.environ["PEER_LIGHTHOUSE"],
        replica_id=f"r{rank}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    ddp = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, make_optimizer(model))
    share = virtual_ranks // size
    turn = Turn(os.environ["PEER_DIRECTORY"], "torchft", rank)
    for step in range(steps):
        turn.step()
        optimizer.zero_grad()  # asks for the quorum
        for number in range(share):
            first = ((step * virtual_ranks) + rank * share + number) * BATCH
            x = torch.stack([sample(first + i, width) for i in range(BATCH)])
            last = number == share - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                (loss_of(ddp(x)) / share).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    committed = manager.current_step() == steps and manager.num_participants() == size
    turn.last(peak_kb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    manager.shutdown(wait=False)
    os._exit(0 if committed else 1)  # its threads would keep the process


if __name__ == "__main__":
    main()
