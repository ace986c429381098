"""The programs of docs/recipes.md run as they stand, where their libraries are installed."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"<!-- needs: (.*?) -->\n```python\n(.*?)```", PAGE, re.DOTALL)


LIBRARIES = ("accelerate", "transformers", "timm", "diffusers", "sentence_transformers", "lightning")


def test_the_page_has_a_recipe_for_each_library() -> None:
    assert {name for needs, _ in RECIPES for name in needs.split(", ")} == set(LIBRARIES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs", "program"), RECIPES, ids=[f"{number}-{needs}" for number, (needs, _) in enumerate(RECIPES)]
)
def test_a_recipe_runs(needs: str, program: str, tmp_path: Path) -> None:
    for name in needs.split(", "):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    if "all-MiniLM-L6-v2" in program:
        python("-c", SMALL_MODEL, folder=tmp_path, check=True)
    done = python("-c", program, folder=tmp_path, environment={"HF_HUB_OFFLINE": "1"}, check=True)
    assert re.search(r"omni: [1-9]\d* graph", done.stdout), done.stdout + done.stderr


# A folder takes the place of the model that the recipe would download.
SMALL_MODEL = """
from pathlib import Path
from transformers import BertConfig, BertModel, BertTokenizerFast
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "sentence", "another", "one", "that", "is", "longer"]
Path("vocab.txt").write_text("\\n".join(words))
BertTokenizerFast("vocab.txt").save_pretrained("all-MiniLM-L6-v2")
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained("all-MiniLM-L6-v2")
"""


@pytest.mark.slow
def test_the_name_in_timms_scripts(tmp_path: Path) -> None:
    checkout = os.environ.get("OMNICOMP_TIMM", "")
    if not checkout or importlib.util.find_spec("timm") is None:
        pytest.skip(
            "needs timm, and its scripts, which no wheel has: OMNICOMP_TIMM=<a checkout of pytorch-image-models>"
        )
    words = ["--torchcompile", "omni", "--bench", "inference", "--model", "vit_tiny_patch16_224"]
    small = ["--device", "cpu", "-b", "1", "--num-warm-iter", "1", "--num-bench-iter", "5", "--model-kwargs", "depth=1"]
    log = tmp_path / "omni.jsonl"
    script = Path(checkout) / "benchmark.py"
    python(script, *words, *small, folder=tmp_path, environment={"OMNICOMP_TIMELINE": str(log)}, fresh=True, check=True)
    done = python("-m", "omnicomp", "audit", log, "--format", "summary", check=True)
    assert done.stdout.startswith("omni: 1 graph"), done.stdout


REGISTERED = """
import omnicomp.backend.accelerate as adapter
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from accelerate.commands.config.config_utils import DYNAMO_BACKENDS
adapter.register()
assert DYNAMO_BACKENDS.count("OMNI") == 1
plugin = TorchDynamoPlugin(backend="omni")
assert DynamoBackend("OMNI") is DynamoBackend.OMNI is plugin.backend and DynamoBackend.list().count("OMNI") == 1
assert plugin.to_kwargs()["backend"] == plugin.to_dict()["backend"] == "omni"
"""


@pytest.mark.parametrize("first", ["", "import accelerate.commands.launch"], ids=["before", "after"])
def test_accelerate_knows_the_name_behind_an_import(first: str) -> None:
    pytest.importorskip("accelerate")
    python("-c", f"{first}\n{REGISTERED}", check=True)


IN_A_RUN = """
from transformers import TrainingArguments
arguments = TrainingArguments(output_dir="out", use_cpu=True, torch_compile_backend="omni")
from accelerate import Accelerator
import torch
print(Accelerator(cpu=True, dynamo_backend="omni").prepare(torch.nn.Linear(4, 4))(torch.ones(2, 4)).shape)
"""


def test_accelerate_knows_the_name_in_omnicomp_run(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(IN_A_RUN)
    words = ["--option", "lowerings=eager", "train.py"]
    done = python("-m", "omnicomp", "run", *words, folder=tmp_path, check=True)
    assert "omni: 1 graph" in done.stderr


SCRIPT = """
import torch
from accelerate import Accelerator
import omnicomp
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
print(__name__, accelerator.state.dynamo_plugin.backend, omnicomp.audit().summary())
"""


@pytest.mark.slow
def test_the_name_in_a_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["launch", "--cpu", "--num_processes", "1", "--dynamo_backend", "omni", "train.py"]
    done = python("-m", "omnicomp.backend.accelerate", *words, folder=tmp_path, fresh=True, check=True)
    assert "__main__ OMNI omni: 1 graph" in done.stdout


PATCHED = """
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from accelerate.commands.launch import launch_command_parser
assert TorchDynamoPlugin(backend="omni").to_kwargs()["backend"] == "omni"
assert DynamoBackend("OMNI") is DynamoBackend("OMNI")
assert launch_command_parser().parse_args(["--dynamo_backend", "omni", "x.py"]).dynamo_backend == "omni"
try:
    DynamoBackend("NO_SUCH_BACKEND")
except ValueError:
    print("refused")
"""


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
def test_the_change_to_accelerate(tmp_path: Path) -> None:
    found = importlib.util.find_spec("accelerate")
    if found is None or found.origin is None:
        pytest.skip("needs accelerate")
    shutil.copytree(Path(found.origin).parent, tmp_path / "src" / "accelerate")
    change = (ROOT / "docs" / "upstream" / "accelerate.patch").read_text()
    done = subprocess.run(["patch", "-p1"], cwd=tmp_path, input=change, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    done = python("-c", PATCHED, environment={"PYTHONPATH": f"{tmp_path / 'src'}:{ROOT}"}, check=True)
    assert done.stdout == "refused\n"
