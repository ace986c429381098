"""Faults that are planted into what omni's passes make of a graph: the share that the checker finds.

Each change of a pass (`omnicomp.passes.changes`) of some models is taken, the new graph is changed in one place as a
mistake in the pass would, and both graphs are compared. A mutant that computes the same on random inputs, within four
times the distance of the unmutated graph and 1e-4, is none.

    python bench/bench_mutants.py [--dynamic]

With `--dynamic` all sizes and floats of the models are symbols.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.attention import hint_of
from omnicomp._torch.fx import copy_module
from omnicomp.analysis import certify
from omnicomp.analysis.nodes import fake_value, op_name
from omnicomp.passes import certificates
from omnicomp.testing.models import MODELS, build

Mutation = Callable[[GraphModule, Node], bool]


def _name(node: Node) -> str:
    return op_name(node).rpartition(".")[2] if node.op.startswith("call_") else ""


def _scale(module: GraphModule, node: Node) -> bool:
    """A scale is forgotten."""
    if _name(node) != "scaled_dot_product_attention" or node.kwargs.get("scale") is None:
        return False
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != "scale"}
    return True


def _other_scale(module: GraphModule, node: Node) -> bool:
    """A scale is squared."""
    if _name(node) != "scaled_dot_product_attention":
        return False
    query: Any = fake_value(node.args[0])
    scale = node.kwargs.get("scale") or query.shape[-1] ** -0.5
    node.kwargs = {**node.kwargs, "scale": scale**2}
    return True


def _mask(module: GraphModule, node: Node) -> bool:
    """A mask is dropped."""
    if _name(node) != "scaled_dot_product_attention" or node.kwargs.get("attn_mask") is None:
        return False
    node.kwargs = {**node.kwargs, "attn_mask": None}
    return True


def _causal(module: GraphModule, node: Node) -> bool:
    """`is_causal` is switched."""
    if _name(node) != "scaled_dot_product_attention" or node.kwargs.get("attn_mask") is not None:
        return False
    node.kwargs = {**node.kwargs, "is_causal": not node.kwargs.get("is_causal", False)}
    return True


def _swapped(module: GraphModule, node: Node) -> bool:
    """Key and value are swapped."""
    if _name(node) != "scaled_dot_product_attention":
        return False
    query, key, value, *rest = node.args
    node.args = (query, value, key, *rest)
    return key is not value


def _query(module: GraphModule, node: Node) -> bool:
    """Query and key are swapped."""
    if _name(node) != "scaled_dot_product_attention":
        return False
    query, key, *rest = node.args
    node.args = (key, query, *rest)
    return query is not key


_COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}


def _comparison(module: GraphModule, node: Node) -> bool:
    """A comparison is swapped."""
    other = _COMPARISONS.get(_name(node))
    if other is None:
        return False
    node.target = other if node.op == "call_method" else getattr(torch, other)
    return True


def _logic(module: GraphModule, node: Node) -> bool:
    """A condition is dropped."""
    if _name(node) not in ("logical_and", "and_", "logical_or", "or_", "bitwise_and", "bitwise_or"):
        return False
    node.replace_all_uses_with(node.args[0])
    return True


def _where(module: GraphModule, node: Node) -> bool:
    """The branches of a choice are swapped."""
    if _name(node) != "where" or len(node.args) != 3:
        return False
    node.args = (node.args[0], node.args[2], node.args[1])
    return True


def _filled(module: GraphModule, node: Node) -> bool:
    """A fill is dropped."""
    if _name(node) != "masked_fill":
        return False
    node.replace_all_uses_with(node.args[0])
    return True


def _fill(module: GraphModule, node: Node) -> bool:
    """A fill is 1."""
    if _name(node) != "masked_fill":
        return False
    node.args = (*node.args[:2], 1.0)
    return True


def _addition(module: GraphModule, node: Node) -> bool:
    """A sum is a difference."""
    if _name(node) != "add":
        return False
    node.target = "sub" if node.op == "call_method" else torch.sub
    return True


def _bias(module: GraphModule, node: Node) -> bool:
    """A summand is dropped."""
    if _name(node) != "add" or not isinstance(node.args[0], Node):
        return False
    node.replace_all_uses_with(node.args[0])
    return True


def _product(module: GraphModule, node: Node) -> bool:
    """A factor is dropped."""
    if _name(node) not in ("mul", "div", "truediv") or not isinstance(node.args[0], Node):
        return False
    node.replace_all_uses_with(node.args[0])
    return True


def _offset(module: GraphModule, node: Node) -> bool:
    """A number is off by one."""
    for place, value in enumerate(node.args):
        if _name(node) in ("add", "sub", "narrow", "tril", "triu", "arange", "select") and type(value) is int:
            node.args = (*node.args[:place], value + 1, *node.args[place + 1 :])
            return True
    return False


def _grouping(module: GraphModule, node: Node) -> bool:
    """Heads are repeated in another order."""
    if _name(node) == "repeat_interleave":
        node.target = torch.Tensor.tile
        return False
    if _name(node) not in ("transpose", "permute") or len(node.users) == 0:
        return False
    value: Any = fake_value(node)
    with module.graph.inserting_after(node):
        flipped = module.graph.call_function(torch.flip, (node, (max(0, value.dim() - 3),)))
    node.replace_all_uses_with(flipped, delete_user_cb=lambda user: user is not flipped)
    return value.dim() >= 3 and value.shape[-3] > 1


def _cast(module: GraphModule, node: Node) -> bool:
    """A cast is lost."""
    if op_name(node) not in ("aten.to.dtype", "Tensor.to", "Tensor.float") or not isinstance(node.args[0], Node):
        return False
    node.replace_all_uses_with(node.args[0])
    return True


def _softmax(module: GraphModule, node: Node) -> bool:
    """A reduction is over another dimension."""
    if _name(node) not in ("all", "any", "amax", "sum", "softmax") or node.kwargs.get("dim") is None:
        return False
    dim: Any = node.kwargs["dim"]
    node.kwargs = {**node.kwargs, "dim": -1 if dim != -1 else -2}
    return True


def _operand(module: GraphModule, node: Node) -> bool:
    """A node reads another value of the same shape."""
    earlier = list(module.graph.nodes)
    earlier = earlier[: earlier.index(node)]
    for old in node.all_input_nodes:
        value = fake_value(old)
        for new in earlier:
            other = fake_value(new)
            if new is old or not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
                continue
            if other.shape == value.shape and other.dtype == value.dtype:
                node.replace_input_with(old, new)
                return True
    return False


MUTATIONS: tuple[Mutation, ...] = (
    _scale,
    _other_scale,
    _mask,
    _causal,
    _swapped,
    _query,
    _comparison,
    _logic,
    _where,
    _filled,
    _fill,
    _addition,
    _bias,
    _product,
    _offset,
    _grouping,
    _cast,
    _softmax,
    _operand,
)


def mutants(module: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """Copies of a graph with one fault each, and what it is."""
    for mutation in MUTATIONS:
        for place in range(len(module.graph.nodes)):
            made = copy_module(module)
            node = list(made.graph.nodes)[place]
            if node.op.startswith("call_") and mutation(made, node):
                made.graph.eliminate_dead_code()
                try:
                    made.graph.lint()
                    made.recompile()
                except (RuntimeError, ValueError):
                    continue
                yield (mutation.__doc__ or "").rstrip("."), made


def _inputs(module: GraphModule, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = fake_value(node)
        if not isinstance(value, torch.Tensor):
            found.append(hint_of(value))
            continue
        shape = [hint_of(size) for size in value.shape]
        if value.is_floating_point():
            found.append(torch.randn(shape, generator=generator).to(value.dtype))
        else:
            found.append((torch.rand(shape, generator=generator) < 0.7).to(value.dtype))
    return found


def differs(before: GraphModule, after: GraphModule, made: GraphModule) -> bool | None:
    """Whether a mutant computes something else; None if it does not run."""
    with torch.no_grad():
        for seed in range(3):
            given = _inputs(before, seed)
            try:
                outs = [
                    side(*[v.clone() if isinstance(v, torch.Tensor) else v for v in given])[0] for side in (after, made)
                ]
            except Exception:
                return None
            right, wrong = outs
            if right.shape != wrong.shape or right.dtype != wrong.dtype:
                return True
            truth = before(*given)[0]
            allowed = 1e-4 + 4 * (right - truth).abs().nan_to_num(0.0)
            if not bool(((wrong - truth).abs() <= allowed).logical_or(wrong.isnan() & truth.isnan()).all()):
                return True
    return False


def collect(names: list[str], policies: list[str], *, dynamic: bool = False) -> list[tuple[str, Any, Any, Any]]:
    """The changes of the passes on some models, each structure once, as they are checked."""
    found: dict[str, tuple[str, Any, Any, Any]] = {}
    check = certify.check

    def seen(before: GraphModule, after: GraphModule, **given: Any) -> Any:
        result = check(before, after, **given)
        if result.holds:
            found.setdefault(f"{before.code}{after.code}", (passing[-1], before, after, given))
        return result

    passing: list[str] = [""]
    certified = certificates.certified

    def named(name: str, *args: Any, **given: Any) -> Any:
        passing.append(name)
        return certified(name, *args, **given)

    certificates.certify.check, certificates.certified = seen, named
    try:
        for name in names:
            for policy in policies:
                torch.compiler.reset()
                case = build(name, "tiny")
                options = {"lowerings": ["eager"], "certify": "always", "dtype_policy": policy}
                with torch.no_grad():
                    torch.compile(case.model, backend="omni", dynamic=dynamic, options=options)(**case.inputs)
    finally:
        certificates.certify.check, certificates.certified = check, certified
    return list(found.values())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["bert", "llama", "t5", "vit"], choices=sorted(MODELS))
    parser.add_argument("--policies", nargs="*", default=["keep", "bf16"])
    parser.add_argument("--dynamic", action="store_true")
    arguments = parser.parse_args()
    made: collections.Counter[str] = collections.Counter()
    killed: collections.Counter[str] = collections.Counter()
    assumed: collections.Counter[str] = collections.Counter()
    for name, before, after, given in collect(arguments.models, arguments.policies, dynamic=arguments.dynamic):
        for what, mutant in mutants(after):
            if not differs(before, after, mutant):
                continue
            key = f"{name}: {what}"
            made[key] += 1
            try:
                verdict = certify.check(before, mutant, **given).verdict
            except Exception:
                verdict = certify.ASSUMED
            killed[key] += verdict == certify.REFUTED
            assumed[key] += verdict == certify.ASSUMED
    for key in sorted(made):
        print(f"| {key} | {made[key]} | {killed[key]} | {assumed[key]} |")
    print(f"| all | {sum(made.values())} | {sum(killed.values())} | {sum(assumed.values())} |")


if __name__ == "__main__":
    main()
