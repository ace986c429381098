"""What a process pays for importing the backend, and for a graph that is known: modules are counted, not seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What a program that compiles a plain graph never needs.
NEVER = (
    "rich",
    "typer",
    "omnicomp.cli",
    "omnicomp.testing",
    "omnicomp.audit",
    "omnicomp.backend.artefacts",
    "omnicomp.backend.background",
    "omnicomp.backend.package",
    "omnicomp.backend.select",
    "omnicomp.backend.variants",
    "omnicomp.devices.inductor",
    "omnicomp.lowerings.engines",
    "omnicomp.passes.dtypes.",
    "omnicomp.runtime.verify",
    "omnicomp.weights",
    "omnicomp.passes.attention.fuse",
    "omnicomp.passes.attention.match",
    "omnicomp.lowerings.overrides.int8_linear",
    "omnicomp.lowerings.overrides.linear_cross_entropy",
    "omnicomp.lowerings.overrides.softmax_topk",
)
MOST_MODULES = 201


def loaded(program: str) -> set[str]:
    """The modules that a program imports beyond what `torch.compile` does."""
    code = (
        "import sys, torch, torch._dynamo.backends.inductor, torch._inductor.compile_fx\n"
        "import torch._functorch.aot_autograd\n"
        f"known = set(sys.modules)\n{program}\nprint('\\n'.join(set(sys.modules) - known))"
    )
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(made.stdout.split())


def test_the_backend_imports_what_every_graph_needs() -> None:
    modules = loaded("from omnicomp.backend.pipeline import omni")
    assert not [name for name in modules if name.startswith(NEVER)]
    assert len([name for name in modules if name.startswith("omnicomp")]) <= MOST_MODULES


@pytest.mark.parametrize("first", ["omnicomp.audit", "omnicomp.audit.model", "omnicomp.timeline"])
def test_the_function_keeps_its_name_whichever_module_came_first(first: str) -> None:
    code = (
        f"import omnicomp, importlib; importlib.import_module({first!r}); import omnicomp.audit as named\n"
        "assert omnicomp.audit() == named() and omnicomp.audit.diff and callable(omnicomp.audit)\n"
        "from omnicomp import audit, record, Audit\n"
        "assert isinstance(audit(), Audit) and audit is omnicomp.audit"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_overrides_that_ship_are_registered_before_others() -> None:
    code = (
        "import torch, omnicomp\n"
        "@omnicomp.override(op=torch.ops.aten.digamma.default, name='later')\n"
        "def later(x): return torch.lgamma(x)\n"
        "from omnicomp.lowerings.overrides.registry import registered\n"
        "names = [item.name for item in registered()]\n"
        "assert names[:4] == ['int8_linear', 'linear_cross_entropy', 'softmax_topk', 'later'], names"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
