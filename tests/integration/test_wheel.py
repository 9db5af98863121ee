"""What people install: the wheel alone, outside the repository, running the README's own loop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
AROUND = """
import json
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x)

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(64, 8, generator=generator)
dataset = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
loss_fn = torch.nn.functional.cross_entropy
"""


def clean_environ(**more: str) -> dict[str, str]:
    dropped = ("EVERSTEP_", "PYTHONPATH", "AWS_")
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)} | more


def run(command: list[str], cwd: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def readme_loop() -> str:
    """Return the README's loop, with the places that do not exist here replaced."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (loop,) = (block for block in blocks if "ctx.epochs" in block)
    assert 'remote="s3://bucket/job"' in loop
    return loop.replace('remote="s3://bucket/job"', 'remote="remote"').replace(
        "nproc=4", 'nproc=2, console="off"'
    )


def test_the_readmes_loop_runs_from_the_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    run([*build, "-w", str(tmp_path / "dist"), str(ROOT)], tmp_path, clean_environ())
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", str(site)]
    run([*install, str(wheel)], tmp_path, clean_environ())
    shipped = {path.name for path in site.iterdir() if path.is_dir()}
    assert {"elastic", "ckpt", "chaos"} <= shipped
    assert not {"train", "tests", "scripts"} & shipped
    work = tmp_path / "work"
    work.mkdir()
    script = work / "mine.py"
    script.write_text(
        AROUND + readme_loop() + "\n    import elastic.run as module\n"
        "    print(json.dumps([result.step, module.__file__]))\n"
    )
    # -I would drop PYTHONPATH; the repository itself must not be found, so its path is not given.
    out = run([sys.executable, str(script)], work, clean_environ(PYTHONPATH=str(site)))
    step, home = json.loads(out.strip().splitlines()[-1])
    assert step == 3  # 64 samples, 8 micro-batches of 8: one step an epoch
    assert home.startswith(str(site))
    listed = run(
        [sys.executable, "-m", "ckpt.cli", "ls", "remote", "--json"],
        work,
        clean_environ(PYTHONPATH=str(site)),
    )
    assert "3" in listed
