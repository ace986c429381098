"""Faults that are planted into the source of omni's passes: what finds them, the checker of certificates or values.

One place of a pass is changed as a mistake would: a condition is dropped or turned round, a comparison swapped, a
number is off by one, a factor, a summand or an argument is forgotten, operands change places, a statement is left out
or comes too early. Only lines that the programs below reach are changed. The passes then run on the graphs of these
programs.

| result | meaning |
|---|---|
| same | all graphs are as without the fault |
| raised | a pass raised, or its result did not fit together |
| checker | a certificate refuted the result |
| values | no certificate did, and the graph computes something else for random inputs |
| equal | other graphs, which compute the same: a place is left alone, say, or another kernel is called |

    python bench/bench_pass_mutants.py --count 400 --out mutants.jsonl
"""

import argparse
import ast
import collections
import copy
import dataclasses
import functools
import importlib
import inspect
import json
import math
import random
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule

import omnicomp
from omnicomp._torch.fx import copy_module
from omnicomp.analysis.certify import Certificate, structure
from omnicomp.analysis.nodes import fake_value
from omnicomp.devices import resolve_device
from omnicomp.options.dtype_policy import parse_dtype_policy
from omnicomp.options.policy import Policy
from omnicomp.passes import PIPELINE
from omnicomp.passes.base import PassContext, run_pipeline
from omnicomp.passes.certificates import NotCertifiedError
from omnicomp.timeline import Certified, Timeline

ROOT = Path(omnicomp.__file__).parent / "passes"
FILES = [
    *ROOT.glob("attention/*.py"),
    *(ROOT / "dtypes" / f"{name}.py" for name in ("rewrite", "resolve", "rules", "analysis", "operators", "fp8")),
    ROOT / "attention_fusion.py",
    ROOT / "dtype_policy.py",
]
LEFT_OUT = ("timings.py", "candidates.py", "session.py", "__init__.py")  # which kernel is fast, and what is timed
SECONDS = 60.0

# ---- programs


def _qkv(h: int = 4, s: int = 6, g: int = 4) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, h, s, 8), torch.randn(2, g, s, 8), torch.randn(2, g, s, 8)


def causal(q, k, v):
    """Causal attention, written out."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(8)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def window(q, k, v):
    """A window of three keys, filled with the lowest number."""
    at = torch.arange(6)
    far = at[:, None] - at[None, :]
    seen = (far >= 0) & (far < 3)
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
    scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def grouped(q, k, v, mask):
    """Grouped heads and an additive mask."""
    b, g, s, d = k.shape
    k = k[:, :, None].expand(b, g, 2, s, d).reshape(b, g * 2, s, d)
    v = v[:, :, None].expand(b, g, 2, s, d).reshape(b, g * 2, s, d)
    scores = torch.matmul(q, k.transpose(2, 3)) * d**-0.5 + mask
    return torch.matmul(scores.softmax(-1), v).transpose(1, 2).contiguous().view(b, s, -1)


def biased(x, w, bias, keep):
    """A bias and padding, of one projection."""
    q, k, v = (x @ w).chunk(3, -1)
    q, k, v = (t.view(2, 6, 4, 8).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT + bias
    scores = scores.masked_fill(~keep[:, None, None, :], -1e9)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def documents(q, k, v, of):
    """A call with a mask of documents."""
    at = torch.arange(6)
    seen = (of[:, :, None] == of[:, None, :]) & (at[:, None] >= at[None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=0.3)


def softcap(q, k, v):
    """Scores that are capped."""
    scores = torch.tanh(q @ k.transpose(-1, -2) * 0.2 / 5.0) * 5.0
    at = torch.arange(6)
    return torch.softmax(scores.masked_fill(at[None, :] > at[:, None], -1e30), -1) @ v


def called(q, k, v):
    """A call with a causal mask in numbers, and one without."""
    mask = torch.full((6, 6), float("-inf")).triu(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) + F.scaled_dot_product_attention(v, k, q)


def alibi(q, k, v):
    """Slopes by the distance, by einsum."""
    at = torch.arange(6)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(4, 1, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 8**0.5 + slopes * (at[None, :] - at[:, None])
    scores = scores + torch.full((6, 6), -10000.0).triu(1)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def dropped(q, k, v):
    """Weights that are dropped."""
    return F.dropout((q @ k.transpose(-2, -1) * 0.35).softmax(-1), 0.1, training=True) @ v


def prefix(q, k, v):
    """A prefix that all see."""
    at = torch.arange(6)
    seen = (at[None, :] <= at[:, None]) | (at[None, :] < 2)
    scores = torch.baddbmm(torch.zeros(8, 6, 6), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=0.3)
    scores = scores.view(2, 4, 6, 6) + (1.0 - seen.float()) * torch.finfo(torch.float32).min
    return scores.softmax(-1) @ v


def heads(x, wq, wo):
    """A call of multi-head attention."""
    out, _ = F.multi_head_attention_forward(
        x, x, x, 32, 4, wq, None, None, None, False, 0.0, wo, None, need_weights=False
    )
    return out


def block(x, w1, b1, w2, g, b):
    """Norms, an MLP, and reductions."""
    y = F.layer_norm(x, (32,), g, b, 1e-5)
    y = F.gelu(F.linear(y, w1, b1)) @ w2
    return (x + y).softmax(-1).log() + y.pow(2).mean(-1, keepdim=True).rsqrt()


def convolved(x, w, b):
    """A convolution behind a norm."""
    y = F.conv2d(x, w, b, padding=1)
    return F.group_norm(F.silu(y), 2).sum(-1) @ torch.ones(6, 3)


def cached(q, k, v, store):
    """Keys that are written into a cache."""
    store[:, :, 2:8] = k
    scores = q @ store[:, :, :8].transpose(-2, -1) * 0.5
    return scores.softmax(-1)[..., 2:] @ v


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, its inputs, and the options that the passes get."""

    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    policy: str = "keep"
    dynamic: bool = False


def programs() -> list[Program]:
    """The programs, each short."""
    torch.manual_seed(0)
    mask = torch.zeros(2, 1, 6, 6)
    linear = torch.randn(2, 6, 32), torch.randn(32, 96), torch.randn(4, 6, 6), torch.ones(2, 6, dtype=torch.bool)
    wide = torch.randn(2, 6, 32), torch.randn(64, 32), torch.randn(64), torch.randn(64, 32), *torch.randn(2, 32)
    found = [Program(each, _qkv()) for each in (causal, window, softcap, called, alibi, dropped, prefix)]
    found += [
        Program(causal, _qkv(), "bf16"),
        Program(window, tuple(each.bfloat16() for each in _qkv())),
        Program(grouped, (*_qkv(g=2), mask)),
        Program(grouped, (*_qkv(g=2), mask), dynamic=True),
        Program(biased, linear),
        Program(biased, linear, "bf16"),
        Program(documents, (*_qkv(), torch.zeros(2, 6, dtype=torch.int64))),
        Program(heads, (torch.randn(6, 2, 32), torch.randn(96, 32), torch.randn(32, 32))),
        Program(block, wide, "bf16"),
        Program(block, wide, "fp16"),
        Program(convolved, (torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3), torch.randn(4)), "bf16"),
        Program(cached, (*_qkv(), torch.zeros(2, 4, 16, 8))),
    ]
    return found


def captured(program: Program) -> GraphModule:
    """The graph that Dynamo makes of a program."""
    found: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        found.append(copy_module(gm))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(program.function, backend=backend, dynamic=program.dynamic)(*program.inputs)
    (graph,) = found
    return graph


def passed(
    graph: GraphModule, program: Program, certify: str, known: dict[str, Certificate]
) -> tuple[GraphModule, Any]:
    """The graph behind the passes, and the certificates."""
    module = copy_module(graph)
    context = PassContext(
        graph_id="g0",
        device=resolve_device("cpu"),
        timeline=Timeline(),
        training=False,
        certify=certify,
        certificates=known,
    )
    policy = Policy(dtype_policy=parse_dtype_policy(program.policy))
    with torch.no_grad():
        run_pipeline([item.of(policy) for item in PIPELINE], module, context, check=True)
    return module, [event for event in context.timeline.events() if isinstance(event, Certified)]


def _number(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _inputs(graph: GraphModule, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for node in graph.graph.find_nodes(op="placeholder"):
        value = fake_value(node)
        if not isinstance(value, torch.Tensor):
            found.append(_number(value))
        elif value.is_floating_point():
            found.append(torch.randn(list(map(_number, value.shape)), generator=generator).to(value.dtype))
        else:
            drawn = torch.rand(list(map(_number, value.shape)), generator=generator)
            found.append((drawn < 0.6 + 0.4 * (torch.arange(drawn.shape[-1]) == 0)).to(value.dtype))
    return found


def results(module: GraphModule, given: list[Any]) -> list[torch.Tensor]:
    """What a graph returns, and its inputs afterwards."""
    own = [value.clone() if isinstance(value, torch.Tensor) else value for value in given]
    with torch.no_grad():
        made = module(*own)
    return [value for value in (*made, *own) if isinstance(value, torch.Tensor)]


def differs(graph: GraphModule, right: GraphModule, made: GraphModule) -> bool:
    """Whether a graph is farther from the program than the passes without a fault leave it."""
    for seed in range(3):
        given = _inputs(graph, seed)
        truth, known, got = (results(each, given) for each in (graph, right, made))
        for a, b, c in zip(truth, known, got, strict=True):
            if (a.shape, a.dtype) != (c.shape, c.dtype):
                return True
            if not a.is_floating_point():
                if not torch.equal(a, c):
                    return True
                continue
            a, b, c = a.double(), b.double(), c.double()
            allowed = 1e-4 + 4 * (b - a).abs().nan_to_num(0.0).max()
            if not bool(((c - a).abs() <= allowed).logical_or(a.isnan() & c.isnan()).all()):
                return True
    return False


# ---- mutants


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: the file, the function, the line, what is wrong, and the source with it."""

    file: Path
    function: str
    line: int
    what: str
    tree: Callable[[], ast.Module]


_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def _faults(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What may be wrong at a node: a name, and what makes it of a copy of the node; None: nothing is left."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SWAPPED:
        yield "comparison swapped", lambda n: ast.Compare(n.left, [_SWAPPED[type(n.ops[0])]()], n.comparators)
    if isinstance(node, ast.BoolOp):
        for place in range(len(node.values)):

            def dropped(n: ast.BoolOp, place: int = place) -> ast.AST:
                rest = n.values[:place] + n.values[place + 1 :]
                return rest[0] if len(rest) == 1 else ast.BoolOp(n.op, rest)

            yield "condition dropped", dropped
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "condition turned round", lambda n: n.operand
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign lost", lambda n: n.operand
    if isinstance(node, ast.If):
        yield "condition dropped", lambda n: ast.If(ast.Constant(False), n.body, n.orelse)
        yield "condition turned round", lambda n: ast.If(ast.UnaryOp(ast.Not(), n.test), n.body, n.orelse)
    if isinstance(node, ast.IfExp):
        yield "branches swapped", lambda n: ast.IfExp(n.test, n.orelse, n.body)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", lambda n: ast.Constant(n.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "truth value turned round", lambda n: ast.Constant(not n.value)
    if isinstance(node, ast.Constant) and type(node.value) is float and math.isfinite(node.value):
        yield "number doubled", lambda n: ast.Constant(n.value * 2 + (n.value == 0))
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        yield "factor forgotten", lambda n: n.left
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield "summand forgotten", lambda n: n.left
        other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield "sum for difference", lambda n: ast.BinOp(n.left, other, n.right)
    if isinstance(node, ast.Call):
        for place, word in enumerate(node.keywords):
            if word.arg:
                yield (
                    "argument forgotten",
                    lambda n, place=place: ast.Call(n.func, n.args, n.keywords[:place] + n.keywords[place + 1 :]),
                )
        if len(node.args) >= 2 and not any(isinstance(each, ast.Starred) for each in node.args):
            yield "operands swapped", lambda n: ast.Call(n.func, [n.args[1], n.args[0], *n.args[2:]], n.keywords)
    if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) >= 2:
        yield "operands swapped", lambda n: ast.Tuple([n.elts[1], n.elts[0], *n.elts[2:]], n.ctx)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement left out", lambda n: ast.Pass()
    if isinstance(node, (ast.Continue, ast.Break)):
        yield "statement left out", lambda n: ast.Pass()


Steps = list[tuple[str, int | None]]


def _swapped(tree: ast.Module, path: Steps, place: int) -> ast.Module:
    """The source with two statements of a body in the other order."""
    made = copy.deepcopy(tree)
    at: Any = made
    for field, index in path:
        at = getattr(at, field) if index is None else getattr(at, field)[index]
    at.body[place : place + 2] = at.body[place : place + 2][::-1]
    return made


def _replaced(tree: ast.Module, path: Steps, make: Callable[[Any], Any]) -> ast.Module:
    made = copy.deepcopy(tree)
    at: Any = made
    for field, index in path[:-1]:
        at = getattr(at, field) if index is None else getattr(at, field)[index]
    field, index = path[-1]
    if index is None:
        setattr(at, field, make(getattr(at, field)))
    else:
        getattr(at, field)[index] = make(getattr(at, field)[index])
    return ast.fix_missing_locations(made)


def mutants(file: Path, reached: set[int]) -> Iterator[Mutant]:
    """The faults of a file, on lines that are reached."""
    tree = ast.parse(file.read_text())

    def walk(node: ast.AST, path: Steps, function: str, names: str) -> Iterator[Mutant]:
        line = getattr(node, "lineno", 0)
        if function and line in reached:
            for what, make in _faults(node):
                yield Mutant(file, function, line, what, functools.partial(_replaced, tree, path, make))
        for field, value in ast.iter_fields(node):
            if field in ("decorator_list", "args", "returns", "annotation") and not isinstance(node, ast.Call):
                continue
            children = enumerate(value) if isinstance(value, list) else [(None, value)]
            for index, child in children:
                if not isinstance(child, ast.AST):
                    continue
                inner, outer = function, names
                if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    outer = f"{names}.{child.name}".lstrip(".")
                    inner = function or (outer if isinstance(child, ast.FunctionDef) else "")
                yield from walk(child, [*path, (field, index)], inner, outer)
        if function and isinstance(node, (ast.FunctionDef, ast.If, ast.For)):
            for place in range(len(node.body) - 1):
                if all(isinstance(each, (ast.Expr, ast.Assign)) for each in node.body[place : place + 2]):
                    first = node.body[place]
                    if first.lineno in reached and not isinstance(getattr(first, "value", None), ast.Constant):
                        made = functools.partial(_swapped, tree, path, place)
                        yield Mutant(file, function, first.lineno, "statements swapped", made)

    yield from walk(tree, [], "", "")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _function(module: types.ModuleType, name: str) -> types.FunctionType | None:
    value: Any = module
    for part in name.split("."):
        value = inspect.getattr_static(value, part, None)
    for attribute in ("fget", "func", "__func__"):
        value = getattr(value, attribute, None) or value
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, types.FunctionType) else None


def _module(file: Path) -> types.ModuleType:
    parts = file.relative_to(ROOT.parent.parent).with_suffix("").parts
    return importlib.import_module(".".join(parts))


def reached_lines(run: Callable[[], Any]) -> dict[str, set[int]]:
    """The lines of the passes that a call runs, by file."""
    wanted, found = set(map(str, FILES)), collections.defaultdict[str, set[int]](set)

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in wanted:
            return None
        if event == "line":
            found[name].add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return found


def forget() -> None:
    """Empty what the passes remember of earlier runs."""
    for name, module in list(sys.modules.items()):
        if name.startswith("omnicomp.passes"):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if clear is not None:
                    clear()


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"{SECONDS} s of CPU time")


def judged(mutant: Mutant, cases: list[Any], known: dict[str, Certificate]) -> dict[str, Any]:
    """What finds a fault."""
    function = _function(_module(mutant.file), mutant.function)
    codes = _codes(compile(mutant.tree(), str(mutant.file), "exec"))
    code = next(each for each in codes if each.co_qualname == mutant.function)
    record: dict[str, Any] = {
        "file": str(mutant.file.relative_to(ROOT)), "line": mutant.line, "function": mutant.function,
        "what": mutant.what, "result": "same", "detail": "", "values": False, "verdicts": [],
    }  # fmt: skip
    if function is None or len(function.__code__.co_freevars) != len(code.co_freevars):
        return {**record, "result": "unplanted"}
    own, rank = function.__code__, ("same", "equal", "values", "raised", "checker")
    function.__code__ = code
    try:
        for program, graph, right, lines in cases:
            if mutant.line not in lines.get(str(mutant.file), ()) or record["result"] not in ("same", "equal"):
                continue
            forget()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            result, detail = "same", ""
            try:
                made, _ = passed(graph, program, "off", {})
                if not structure.same(right, made):
                    wrong = "dropout" not in graph.code and differs(graph, right, made)
                    result, record["values"] = ("values" if wrong else "equal"), record["values"] or wrong
                    _, events = passed(graph, program, "new", known)
                    record["verdicts"] += [event.verdict for event in events]
                    refuted = [event.sentence for event in events if event.verdict == "refuted"]
                    result, detail = ("checker", refuted[0]) if refuted else (result, "")
            except NotCertifiedError as error:
                result, detail = "checker", str(error)
            except Exception as error:
                result, detail = "raised", f"{type(error).__name__}: {error}".partition("\n")[0]
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            if rank.index(result) > rank.index(record["result"]):
                record.update(result=result, detail=f"{program.function.__name__} {program.policy}: {detail}"[:300])
    finally:
        function.__code__ = own
        forget()
    return record


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="faults, drawn at random; 0: all")
    parser.add_argument("--part", default="0/1", help="only every n-th of them, from the i-th on: i/n")
    parser.add_argument("--out", default="", help="a file for a line of JSON a fault")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPROF, _too_long)
    known: dict[str, Certificate] = {}
    cases: list[Any] = []
    for program in programs():
        graph = captured(program)
        passed(graph, program, "off", {})  # what is imported and kept once
        lines = reached_lines(lambda graph=graph, program=program: passed(graph, program, "off", {}))
        right, _ = passed(graph, program, "off", {})
        _, events = passed(graph, program, "new", known)
        verdicts = [event.verdict for event in events]
        assert "refuted" not in verdicts, (program.function.__name__, program.policy, events)
        print(f"{program.function.__name__} {program.policy}: {verdicts}", file=sys.stderr, flush=True)
        cases.append((program, graph, right, lines))
    lines = {str(file): set().union(*(case[3].get(str(file), set()) for case in cases)) for file in FILES}
    files = [file for file in sorted(FILES) if file.name not in LEFT_OUT]
    faults = [mutant for file in files for mutant in mutants(file, lines[str(file)])]
    random.Random(0).shuffle(faults)
    index, of = map(int, arguments.part.split("/"))
    chosen = (faults[: arguments.count] if arguments.count else faults)[index::of]
    print(f"{len(faults)} faults on lines that are reached, {len(chosen)} of them tried", file=sys.stderr, flush=True)
    found: list[dict[str, Any]] = []
    for mutant in chosen:
        found.append(judged(mutant, cases, known))
        if arguments.out:
            with Path(arguments.out).open("a") as out:
                print(json.dumps(found[-1]), file=out)
    report(found)


def report(found: list[dict[str, Any]]) -> None:
    """A table of results by kind of fault."""
    results = ("same", "raised", "checker", "values", "equal")
    table = collections.Counter((each["what"], each["result"]) for each in found)
    print(f"| fault | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
    for what in sorted({each["what"] for each in found}):
        print(f"| {what} | {' | '.join(str(table[what, each]) for each in results)} |")
    total = collections.Counter(each["result"] for each in found)
    print(f"| all {len(found)} | {' | '.join(str(total[each]) for each in results)} |")


if __name__ == "__main__":
    main()
