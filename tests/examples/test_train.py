"""examples/train: the calls of torchtitan on two gloo processes, compiled and not."""

import re
from pathlib import Path

import pytest
from processes import python

SCRIPT = Path(__file__).parents[2] / "examples" / "train" / "llama.py"


def losses(folder: Path, *words: str, runner: tuple[str, ...] = ()) -> tuple[list[float], str]:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = python(*launch, *runner, SCRIPT, "--steps", "3", *words, folder=folder, fresh=True, timeout=400, check=True)
    return [float(text) for text in re.findall(r"loss (\S+)", done.stdout)], done.stderr


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
    expected, _ = losses(tmp_path, *words, "--backend", "none")
    assert len(expected) == 3
    # As torchtitan is run with omni: it names Inductor, also where it checks the name.
    runner = ("-m", "omnicomp", "run", "--option", "lowerings=eager")
    found, said = losses(tmp_path, *words, "--backend", "inductor", runner=runner)
    assert found == pytest.approx(expected, abs=2e-4)
    assert "omni: " in said
    assert "nothing was compiled" not in said


@pytest.mark.slow
@pytest.mark.inductor
def test_by_name_on_inductor(tmp_path: Path) -> None:
    expected, _ = losses(tmp_path, "--backend", "none")
    assert losses(tmp_path, "--backend", "omni")[0] == pytest.approx(expected, abs=2e-4)
