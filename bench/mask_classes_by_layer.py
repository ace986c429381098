"""How many attentions of models have their mask settled by its values, if each layer is compiled by itself.

    python bench/mask_classes_by_layer.py MODELS.py hf/llama hf/bert --mask none pad leftpad --attention sdpa eager

MODELS.py defines `build(name, attn, B, S, mask)`, which returns a module and its keyword arguments. The forward of the
model runs in eager; each item of its outermost `nn.ModuleList`s is compiled, so that masks are inputs. Printed are, for
each model, the attentions of all layers: without a mask, with one that was left out since its values showed its class,
with one that was looked at, and with one that was not, such as a learned bias; and how far results are from eager's.
"""

import argparse
import collections
import importlib.util
import sys
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import omnicomp
from omnicomp.passes.attention import assume
from omnicomp.timeline import NearMiss, Retreat, Rewrite, Speculation

OPTIONS = {"lowerings": ["eager"], "summary": False}
COLUMNS = ("no mask", "left out", "looked at", "not looked at", "not fused")


def layers(model: nn.Module) -> list[nn.Module]:
    """The items of the outermost module lists."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and type(child).forward is nn.ModuleList.forward:
                found.extend(item for item in child if type(item).forward is not nn.Module.forward)
            else:
                visit(child)

    visit(model)
    return found


def run(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """The numbers that a model returns."""
    out = model(**inputs)
    out = out.to_tuple() if hasattr(out, "to_tuple") else out
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def counted(events: list[Any]) -> collections.Counter[str]:
    """What became of the masks of the attentions of all layers; of several variants that of the first counts."""
    asked = {event.graph for event in events if isinstance(event, Speculation)}
    sites = [e for e in events if isinstance(e, Rewrite | NearMiss) and e.kind == "attention"]
    first: dict[str, str] = {}
    for event in sites:
        first.setdefault(event.graph.partition(":")[0], event.graph)
    found: collections.Counter[str] = collections.Counter()
    for event in sites:
        graph = event.graph.partition(":")[0]
        if event.graph != first[graph]:
            continue
        if isinstance(event, NearMiss):
            found["not fused"] += 1
        elif "mask" in event.detail:
            found["looked at" if graph in asked else "not looked at"] += 1
            if graph not in asked:
                print(f"    not looked at: {event.detail}, {event.source}", flush=True)
        else:
            found["left out" if graph in asked else "no mask"] += 1
    return found


def measured(build: Any, name: str, attention: str, mask: str, size: int) -> tuple[collections.Counter[str], float]:
    """What became of the masks of a model, and the greatest relative error of what it returns."""
    torch.compiler.reset()
    omnicomp.timeline.clear()
    torch.manual_seed(0)
    model, inputs = build(name, attention, 2, size, mask)
    model.eval()
    with torch.no_grad():
        wanted = run(model, inputs)
        for layer in layers(model):
            layer.compile(backend="omni", options=OPTIONS)
        got = run(model, inputs)
    worst = 0.0
    for one, other in zip(got, wanted, strict=True):
        if not torch.equal(one.isnan(), other.isnan()):
            worst = float("nan")
        error = (one.double() - other.double()).nan_to_num().norm() / other.double().nan_to_num().norm().clamp_min(1e-6)
        worst = max(worst, error.item())
    events = omnicomp.timeline.events()
    for event in events:
        if isinstance(event, Retreat):
            print(f"    {name}: {event.reason.sentence}", flush=True)
        if isinstance(event, NearMiss) and event.kind == "attention":
            print(f"    {name}: {event.reason.sentence}: {event.reason.observed}", flush=True)
    return counted(events), worst


def main() -> int:
    """Count, and print the counts; 1 if a model gave other results than eager."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", help="a file that defines build(name, attn, B, S, mask)")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--mask", nargs="+", default=["none", "pad", "leftpad"])
    parser.add_argument("--attention", nargs="+", default=["sdpa", "eager"])
    parser.add_argument("--size", type=int, default=32)
    arguments = parser.parse_args()
    spec = importlib.util.spec_from_file_location("models", arguments.models)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assume.worth = lambda *args, **kwargs: None  # small models show what is done with large ones
    total: collections.Counter[str] = collections.Counter()
    wrong = 0
    print(f"{'':34}" + "".join(f"{column:>15}" for column in (*COLUMNS, "error")))
    for name in arguments.names:
        for attention in arguments.attention:
            for mask in arguments.mask:
                label = f"{name} {attention} {mask}"
                try:
                    found, error = measured(module.build, name, attention, mask, arguments.size)
                except Exception as error:  # a model that can't be built is named, and the others are counted
                    print(f"{label:34} {type(error).__name__}: {str(error).splitlines()[0][:80]}", flush=True)
                    continue
                total += found
                wrong += not error < 1e-3
                print(f"{label:34}" + "".join(f"{found[c]:15}" for c in COLUMNS) + f"{error:15.1e}", flush=True)
    print(f"{'all':34}" + "".join(f"{total[c]:15}" for c in COLUMNS) + f"{wrong:9} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
