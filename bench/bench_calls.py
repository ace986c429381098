"""How many attentions that models call have their mask settled, and whether their values stay eager's.

    python bench/bench_calls.py MODELS.py hf/llama hf/bert --ways sdpa flex_attention sdpa/layers --mask pad leftpad

MODELS.py defines `build(name, attn, batch, tokens, mask)`, which returns a module and its keyword arguments, and may
define `reinit(model)`, which gives it weights that let its attentions differ. A way is a setting of transformers'
attention; the whole model is compiled, or behind `/layers` each item of its outermost `nn.ModuleList`s by itself, so
that masks are inputs. The passes run, and no code is generated. Small models stand for large ones: what a check of a
mask costs is left out of account.

An attention is settled if nothing is left to be found of its mask. Columns, those before `open` are settled:

| column | the attention |
|---|---|
| `told` | has no mask, or one that became `is_causal` or was left out |
| `blocks` | is FlexAttention, with a mask that has a name |
| `named` | has a dense mask that has a name, which the program or its values showed; no kernel does without it |
| `bias` | adds numbers of its own to the scores, or FlexAttention computes them; no kernel does without |
| `open` | has a mask of which nothing is known |
| `missed` | is not fused |
"""

import argparse
import collections
import importlib.util
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import omnicomp
from omnicomp.passes.attention import assume, visited
from omnicomp.timeline import NearMiss, Retreat, Rewrite, Speculation

OPTIONS: Final = {"lowerings": ["eager"], "summary": False}
COLUMNS: Final = ("told", "blocks", "named", "bias", "open", "missed")
SETTLED: Final = COLUMNS[:4]
_MASK: Final = re.compile(r"mask \((.*?)\)(?=,|;|$)")
Found = collections.Counter[str]


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


def column_of(event: Rewrite | NearMiss, shown: str | None) -> str:
    """Where an attention counts; `shown` is what the values of its graph's masks showed, None if nobody looked."""
    if isinstance(event, NearMiss):
        return "missed"
    mask = _MASK.search(event.detail)
    if mask is None:
        return "bias" if "score" in event.detail else "told"
    names = mask.group(1).split(" and ")
    if "bias" in names and shown is None:
        return "bias"  # whatever hides keys beside it, no kernel does without the numbers
    if (shown == "" and not {"unknown", "bias"}.isdisjoint(names)) or (shown is None and "unknown" in names):
        return "open"
    if event.target == "flex_attention":
        return "blocks"
    return "bias" if names == ["bias"] and (shown is None or shown.endswith(": a bias")) else "named"


def counted(events: list[Any]) -> Iterator[tuple[str, Rewrite | NearMiss]]:
    """The attentions of all graphs, each with its column; of several variants of a graph those of the first."""
    shown: dict[str, str] = {}
    first: dict[str, str] = {}
    for event in events:
        if isinstance(event, Speculation) and event.state in ("held", "failed"):
            # A class or a usual name follows the colon, for each mask that was looked at.
            known = all(": " in part for part in event.sentence.split("; "))
            shown.setdefault(event.graph, event.sentence if known else "")
    for event in events:
        if isinstance(event, Rewrite | NearMiss) and event.kind == "attention":
            graph = event.graph.partition(":")[0]
            if first.setdefault(graph, event.graph) == event.graph:
                yield column_of(event, shown.get(graph)), event


def measured(models: Any, name: str, way: str, mask: str, size: int) -> tuple[Found, float]:
    """What became of the masks of a model, and the greatest relative error of what it returns."""
    attention, _, by_layer = way.partition("/")
    torch.compiler.reset()
    omnicomp.timeline.clear()
    torch.manual_seed(0)
    model, inputs = models.build(name, attention, 2, size, mask)
    if hasattr(models, "reinit"):
        models.reinit(model)
    model.eval().requires_grad_(False)
    with torch.no_grad():
        with torch.compiler.set_stance("force_eager"):
            wanted = run(model, inputs)
        for module in layers(model) if by_layer else [model]:
            module.compile(backend="omni", options=OPTIONS)
        got = run(model, inputs)
    worst = 0.0
    for one, other in zip(got, wanted, strict=True):
        if not torch.equal(one.isnan(), other.isnan()):
            worst = float("nan")
        error = (one.double() - other.double()).nan_to_num().norm() / other.double().nan_to_num().norm().clamp_min(1e-6)
        worst = max(worst, error.item())
    found: Found = collections.Counter()
    events = omnicomp.timeline.events()
    for column, event in counted(events):
        found[column] += 1
        if isinstance(event, NearMiss):
            print(f"    missed: {event.reason.sentence}: {event.reason.observed}", flush=True)
        elif column not in SETTLED:
            print(f"    {column}: {event.detail}, {event.source}", flush=True)
    for event in events:
        if isinstance(event, Retreat):
            print(f"    {name}: {event.reason.sentence}", flush=True)
    return found, worst


def main() -> int:
    """Count, and print the counts; 1 if a model gave other results than eager."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", help="a file that defines build(name, attn, batch, tokens, mask)")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--mask", nargs="+", default=["none", "pad", "leftpad"])
    parser.add_argument("--ways", nargs="+", default=["sdpa", "flex_attention", "sdpa/layers"])
    parser.add_argument("--size", type=int, default=32)
    arguments = parser.parse_args()
    spec = importlib.util.spec_from_file_location("models", arguments.models)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for each in (assume, visited):
        each.worth = lambda *args, **kwargs: None  # small models show what is done with large ones
    totals: dict[str, Found] = {way: collections.Counter() for way in arguments.ways}
    wrong = 0
    print(f"{'':44}" + "".join(f"{column:>8}" for column in (*COLUMNS, "error")))
    for name in arguments.names:
        for way in arguments.ways:
            for mask in arguments.mask:
                label = f"{name} {way} {mask}"
                try:
                    found, error = measured(module, name, way, mask, arguments.size)
                except Exception as error:  # a model that can't be built is named, and the others are counted
                    print(f"{label:44} {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}", flush=True)
                    continue
                totals[way] += found
                wrong += not error < 1e-3
                print(f"{label:44}" + "".join(f"{found[c]:8}" for c in COLUMNS) + f"{error:8.0e}", flush=True)
    for way, total in totals.items():
        settled = sum(total[column] for column in SETTLED)
        print(f"{way:44}" + "".join(f"{total[c]:8}" for c in COLUMNS) + f"  {settled} of {total.total()} settled")
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
