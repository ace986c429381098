"""examples/train: the calls of torchtitan on two gloo processes, compiled and not."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import python

SCRIPT = Path(__file__).parents[2] / "examples" / "train" / "llama.py"


def losses(text: str) -> list[float]:
    found = [float(number) for number in re.findall(r"loss (\S+)", text)]
    assert len(found) == 3
    return found


def ranks(folder: Path, *words: str) -> list[float]:
    """The losses of the first of two ranks, which are forked, as `torchrun` and what it starts all import torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}

    def run(rank: str) -> str:
        return python(
            SCRIPT, "--steps", "3", *words, environment={**job, "RANK": rank}, folder=folder, check=True
        ).stdout

    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(run, "01")
    return losses(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--attention", "written", "--checkpoint", "selective"),
        ("--attention", "sdpa", "--checkpoint", "none", "--tp", "2"),
        ("--attention", "flex", "--checkpoint", "none"),
    ],
    ids=["fsdp", "tp", "flex"],
)
def test_losses_are_eagers(words: tuple[str, ...], tmp_path: Path) -> None:
    # As torchtitan is run with omni: it names Inductor, also where it checks the name.
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    runner = ("-m", "omnicomp", "run", "--option", "lowerings=eager", SCRIPT, "--steps", "3", "--backend", "inductor")
    done = python(*launch, *runner, *words, folder=tmp_path, fresh=True, timeout=400, check=True)
    assert losses(done.stdout) == pytest.approx(ranks(tmp_path, *words, "--backend", "none"), abs=2e-4)
    assert "omni: " in done.stderr
    assert "nothing was compiled" not in done.stderr


@pytest.mark.slow
@pytest.mark.inductor
def test_by_name_on_inductor(tmp_path: Path) -> None:
    expected = ranks(tmp_path, "--backend", "none")
    assert ranks(tmp_path, "--backend", "omni") == pytest.approx(expected, abs=2e-4)
