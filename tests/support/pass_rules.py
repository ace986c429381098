"""Rules of a third party's pass, right ones and wrong ones, each as a program before and after it.

`judged` compiles the program with a pass that puts the one graph in the place of the other; it gives the certificates.
The tables have a line of inputs, and below it a line for each rule: its name, the program, what becomes of it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from omnicomp import timeline
from omnicomp.analysis import certify
from omnicomp.analysis.nodes import fake_value
from omnicomp.passes import Pass, PassContext, PassResult
from omnicomp.timeline import Certified, Retreat

Function = Callable[..., Any]
INF = math.inf


@dataclasses.dataclass(frozen=True)
class Rule:
    """A program and what a pass makes of it.

    Attributes:
        name: what the rule does.
        before: the program as it was, an expression.
        after: it as the pass has it.
        given: the inputs: their letters, shapes and dtypes or numbers, and words: `dynamic` where sizes and numbers are
            symbols, `grad` where inputs have gradients, and kinds of assumptions that the pass claims.
    """

    name: str
    before: str
    after: str
    given: str

    def inputs(self) -> list[Any]:
        """New ones."""
        words = self.given.partition(": ")[2].split()
        (dtype,) = {getattr(torch, word) for word in words if hasattr(torch, word)} or {torch.float32}
        found: list[Any] = []
        for word in words:
            if "." in word:
                found.append(float(word))
            elif word[0].isdigit():
                shape, _, own = word.partition(":")
                kind = getattr(torch, own) if own else dtype
                sizes = [int(each) for each in shape.split("x")]
                found.append((torch.randn(sizes) if kind.is_floating_point else torch.randint(0, 2, sizes)).to(kind))
        grad = "grad" in words
        return [v.requires_grad_(grad and v.is_floating_point()) if isinstance(v, torch.Tensor) else v for v in found]

    def functions(self) -> list[Function]:
        """The program before and after it."""
        letters = self.given.partition(":")[0]
        parts = (f"({text}" + "\n)" for text in (self.before, self.after))
        if letters == "mask":
            return [kept(eval(f"lambda q, k: {text}")) for text in parts]
        return [eval(f"lambda {', '.join(letters)}: {text}") for text in parts]


@dataclasses.dataclass(frozen=True)
class Graft(Pass):
    """Puts a graph in the place of the one that it is given."""

    name: ClassVar[str] = "graft"
    rule: ClassVar[Any] = None
    made: ClassVar[Any] = None

    def claims(self, context: PassContext) -> tuple[certify.Assumption, ...]:
        """Those of the rule."""
        return tuple(certify.Assumption(word) for word in self.rule.given.split() if word in certify.KINDS)

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Where the inputs are those of the graph; a number that was read may be a constant of the next one."""
        given = {str(node.target) for node in module.graph.find_nodes(op="placeholder")}
        needed = (node for node in self.made.graph.find_nodes(op="placeholder"))
        tensors = {str(node.target) for node in needed if isinstance(fake_value(node), torch.Tensor)}
        return module is context.root and tensors <= given

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Put it there."""
        graph = module.graph
        *old, output = (node for node in graph.nodes if node.op != "placeholder")
        given = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
        inputs = self.made.graph.find_nodes(op="placeholder")
        with graph.inserting_before(output):
            for node in inputs:
                if str(node.target) not in given:  # a size that the program as it was knows as another one's
                    given[str(node.target)] = _size(graph, fake_value(node), inputs, given)
        values = {node: given[str(node.target)] for node in inputs}
        for node in self.made.graph.find_nodes(op="get_attr"):
            setattr(module, f"new_{node.target}", getattr(self.made, node.target))
            node.target = f"new_{node.target}"
        with graph.inserting_before(output):
            output.args = (graph.graph_copy(self.made.graph, values),)
        for node in reversed(old):
            graph.erase_node(node)
        module.recompile()
        return PassResult(module, True)


def _size(graph: torch.fx.Graph, size: Any, inputs: Sequence[Node], given: Mapping[str, Node]) -> Node:
    """A size as that of an input that has it."""
    shapes = {node: fake_value(node).shape for node in inputs if isinstance(fake_value(node), torch.Tensor)}
    for node, shape in shapes.items():
        for dim, each in enumerate(shape):
            if isinstance(each, torch.SymInt) and each.node.expr == size.node.expr:
                made = graph.call_function(torch.ops.aten.sym_size.int, (given[str(node.target)], dim))
                made.meta["example_value"] = fake_value(given[str(node.target)]).shape[dim]
                return made
    raise LookupError(f"no input has the size {size}")


def captured(function: Function, inputs: Sequence[Any], dynamic: bool) -> GraphModule:
    """The graph of Dynamo."""
    found: list[GraphModule] = []

    def keep(module: GraphModule, _: Any) -> Any:
        found.append(module)
        return module.forward

    torch.compiler.reset()
    torch.compile(function, backend=keep, dynamic=dynamic, fullgraph=True)(*inputs)
    (module,) = found
    return module


def judged(rule: Rule) -> list[Certified]:
    """The certificates of the pass; empty where it was left out without one."""
    before, after = rule.functions()
    dynamic = "dynamic" in rule.given
    Graft.rule, Graft.made = rule, captured(after, rule.inputs(), dynamic)
    torch.compiler.reset()
    timeline.clear()
    options = {"lowerings": ["eager"], "certify": "always", "disable_passes": ["attention_fusion"], "passes": [Graft()]}
    torch.compile(before, backend="omni", dynamic=dynamic, fullgraph=True, options=options)(*rule.inputs())
    for event in timeline.events():
        left = isinstance(event, Retreat) and event.reason.code != "not_certified"
        assert not left or "PassError" in event.reason.sentence, event
    return [event for event in timeline.events() if isinstance(event, Certified) and event.name == "graft"]


def accepted(events: Sequence[Certified]) -> bool:
    """Whether all that the pass did stayed."""
    return bool(events) and all(event.verdict != certify.REFUTED for event in events)


def kept(mask: Function) -> Function:
    """What is seen of a square matrix."""

    def run(x: Any) -> Any:
        size = x.shape[-1]
        return x * mask(torch.arange(size)[:, None], torch.arange(size)[None, :])

    return run


def attend(mask: Function | None = None, scale: float = 8**-0.5, drop: float = 0.0) -> Function:
    """Attention by hand, with a predicate of query and key that says what is seen."""

    def run(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-1, -2) * scale
        if mask is not None:
            at = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
            scores = scores.masked_fill(~mask(*at), -INF)
        return F.dropout(scores.softmax(-1), drop) @ v

    return run


def sdpa(**options: Any) -> Function:
    """torch's own attention."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def writes(first: int, second: int) -> Function:
    def run(x: Any, y: Any) -> Any:
        x = x.clone()
        row = x.view(-1)[:6]
        for which in (first, second):
            (x[0] if which else row).copy_(y[which])
        return x * 2

    return run


def read_late(x: Any, y: Any) -> Any:
    x = x.clone()
    x.add_(y)
    return x.sum(0) + x


def read_early(x: Any, y: Any) -> Any:
    x = x.clone()
    read = x.sum(0)
    x.add_(y)
    return read + x


def two_draws(x: Any) -> Any:
    return torch.rand_like(x) - torch.rand_like(x) + x


def one_draw(x: Any) -> Any:
    drawn = torch.rand_like(x)
    return drawn - drawn + x


def uniform_then_normal(x: Any) -> Any:
    a, b = torch.rand_like(x), torch.randn_like(x)
    return a * 2 + b + x


def normal_then_uniform(x: Any) -> Any:
    b, a = torch.randn_like(x), torch.rand_like(x)
    return a * 2 + b + x


def straight_through(x: Any) -> Any:
    return x + (x.round() - x).detach()


def no_grad(x: Any, y: Any) -> Any:
    with torch.no_grad():
        scale = x.sum()
    return y * scale + x


def norm(x: Any, axis: int = -1, eps: float = 1e-5, correction: int = 0) -> Any:
    return (x - x.mean(axis, True)) / (x.var(axis, correction=correction, keepdim=True) + eps).sqrt()


def causal(x: Any) -> Any:
    hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
    return (x @ x.mT / x.shape[-1] ** 0.5).masked_fill(hidden, -INF).softmax(-1) @ x


def corner(last: bool) -> Function:
    """Causal attention, aligned to the last corner of its mask or to the first one."""

    def run(q: Any, k: Any, v: Any) -> Any:
        rows, columns = q.shape[-2], k.shape[-2]
        moved = columns - rows if last else 0
        seen = torch.arange(columns)[None] <= torch.arange(rows)[:, None] + moved
        return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -INF).softmax(-1) @ v

    return run


def filled(empty: int = 0, through: Function = lambda q: q, unseen: int = 2) -> Function:
    """Attention with later keys hidden by a sum, and the first two by a fill: its first rows see nothing.

    Scores that a minimum is added to pass gradients on even there, unless the queries of the rows are zeros.

    Args:
        empty: how many rows of queries are zeros.
        through: what happens to queries.
        unseen: to how many queries each key is a later one.
    """

    def run(q: Any, k: Any, v: Any) -> Any:
        rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        late = torch.where((columns > rows) | (rows < unseen), -1e30, 0.0)
        scores = through(q.masked_fill(rows < empty, 0.0)) @ k.mT / q.shape[-1] ** 0.5 + late
        return scores.masked_fill(columns < 2, -1e30).softmax(-1) @ v

    return run


def switched(kept: bool) -> Function:
    """Attention that an input hides as a whole where it is odd.

    Args:
        kept: whether queries get a gradient where nothing is seen.
    """

    def run(q: Any, k: Any, v: Any, switch: Any) -> Any:
        hidden = (switch % 2 == 1)[:, None, None]
        scores = (q if kept else q.masked_fill(hidden, 0.0)) @ k.mT / q.shape[-1] ** 0.5
        return (scores + torch.where(hidden, -1e30, 0.0)).softmax(-1) @ v

    return run


_DRAWS: dict[str, Function] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "integers": lambda x: torch.randint(0, 5, (x.shape[-1],)),
    "normal": lambda x: torch.empty_like(x).normal_(),
    "permutation": lambda x: torch.randperm(x.shape[-1]),
    "uniform": torch.rand_like,
}


def drawn(*order: str) -> Function:
    """Random numbers that are drawn in an order, and added in one that does not depend on it."""

    def run(x: Any) -> Any:
        found = {word: _DRAWS[word](x) for word in order}
        return sum((found[word] for word in sorted(order)), x)

    return run


def written(x: Any, y: Any, *places: int, accumulate: bool = False) -> Any:
    """The first rows of a tensor, written to rows of another."""
    return x.clone().index_put_((torch.tensor(places),), y[: len(places)], accumulate=accumulate)


def added(x: Any, y: Any, *places: int) -> Any:
    """Rows that are read, added to, and written."""
    at = torch.tensor(places)
    return x.clone().index_put_((at,), x[at] + y[: len(places)])


def row(copied: bool) -> Function:
    """A row, or a copy of it, that is read behind a write."""

    def run(x: Any, y: Any) -> Any:
        x = x.clone()
        read = x[0].clone() if copied else x[0]
        x.add_(y)
        return read * 2

    return run


def shifted(one_by_one: bool) -> Function:
    """Each row from the one above it, before or after that was written."""

    def run(x: Any) -> Any:
        x = x.clone()
        if not one_by_one:
            x[1:] = x[:-1].clone() + 1
        for place in range(1, x.shape[0]) if one_by_one else ():
            x[place] = x[place - 1] + 1
        return x * 1

    return run


def _rules(table: str) -> list[Rule]:
    found: list[Rule] = []
    given = ""
    for line in table.strip().replace("\n    ", " ").splitlines():
        if line.startswith("== "):
            given = line[3:]
            continue
        name, _, text = line.partition(": ")
        before, after = text.split(" -> ")
        found.append(Rule(name, before, after, given))
    return found


WRONG: list[Rule] = _rules("""
== qkv: 2x4x6x8 2x4x6x8 2x4x6x8
forgotten scale: attend()(q, k, v) -> attend(scale=1.0)(q, k, v)
scale of another size: attend()(q, k, v) -> sdpa(scale=6 ** -0.5)(q, k, v)
swapped keys and values: attend()(q, k, v) -> F.scaled_dot_product_attention(q, v, k)
mask of one too few: attend(lambda q, k: k <= q)(q, k, v) -> attend(lambda q, k: k < q + (q == 0))(q, k, v)
inverted mask: attend(lambda q, k: k <= q)(q, k, v) -> attend(lambda q, k: k >= q)(q, k, v)
no mask: attend(lambda q, k: k <= q)(q, k, v) -> sdpa()(q, k, v)
lost dropout: attend(drop=0.1)(q, k, v) -> attend()(q, k, v)
other dropout: attend(drop=0.1)(q, k, v) -> attend(drop=0.2)(q, k, v)
== xy: 6x6 6x6
swapped difference: x - y -> y - x
swapped quotient: x.exp() / y.exp() -> y.exp() / x.exp()
swapped product: x @ y -> y @ x
maximum of sums: x.amax(-1) + y.amax(-1) -> (x + y).amax(-1)
root of a sum: (x.abs() + y.abs()).sqrt() -> x.abs().sqrt() + y.abs().sqrt()
dropout of another place: F.dropout(x, 0.5) @ y -> x @ F.dropout(y, 0.5)
writes in another order: writes(0, 1)(x, y) -> writes(1, 0)(x, y)
read before a write: read_late(x, y) -> read_early(x, y)
write to an input: x.add_(y) * 2 -> (x + y) * 2
write that is new: (x + y) * 2 -> x.add_(y) * 2
not less: ~(x < y) -> x >= y
maximum that forgets NaN: torch.maximum(x, y) -> torch.where(x > y, x, y)
fmax for maximum: torch.maximum(x, y) -> torch.fmax(x, y)
logarithm of a product: (x * y).log() -> x.log() + y.log()
product of factors for where: torch.where(y > 0, x, 0.0) -> x * (y > 0)
negated difference: -(x - y) -> y - x
ties of a comparison: (x > y).float() -> (x >= y).float()
input through a view: x.view(-1)[:6].add_(y[0]) * 2 -> (x[0] + y[0]) * 2
== x: 6x6
softmax of another dimension: x.softmax(-1) -> x.softmax(-2)
sum of another dimension: x.sum(0) -> x.sum(1)
epsilon outside of the root: norm(x) -> (x - x.mean(-1, True)) / (x.std(-1, correction=0, keepdim=True) + 1e-05)
biased variance: norm(x) -> norm(x, correction=1)
other epsilon: norm(x) -> F.layer_norm(x, (6,), eps=1e-06)
gelu of tanh: F.gelu(x) -> F.gelu(x, approximate='tanh')
split of wrong sizes: torch.cat(x.split([2, 4], -1)[::-1], -1) -> torch.cat(x.split([4, 2], -1)[::-1], -1)
rolled the other way: torch.cat([x[:, 1:], x[:, :1]], 1) -> x.roll(1, 1)
mean of means of unequal parts: x.mean() -> (x[:2].mean() + x[2:].mean()) / 2
lost truncation: x.int().float() -> x * 1.0
rounding for truncation: x.int() -> x.round().int()
floor for truncation: x.int() -> x.floor().int()
lost rounding to bfloat16: x.bfloat16().float() * 2 -> x * 2
merged draws: two_draws(x) -> one_draw(x)
draws in another order: uniform_then_normal(x) -> normal_then_uniform(x)
merged dropouts: F.dropout(x, 0.5) + F.dropout(x, 0.5) -> 2 * F.dropout(x, 0.5)
alias for a copy: x.clone() -> x.view(6, 6)
as_strided of another layout: x.t().contiguous().as_strided((5,), (1,)) * 1 -> x.t().as_strided((5,), (1,)) * 1
other strides: x.t().contiguous() -> x.t() * 1
times zero: x * 0 -> torch.zeros_like(x)
difference of itself: x - x -> torch.zeros_like(x)
quotient of itself: x / x -> torch.ones_like(x)
equal to itself: x == x -> torch.ones_like(x, dtype=torch.bool)
isnan is false: x.isnan() -> torch.zeros_like(x, dtype=torch.bool)
nan_to_num is lost: x.nan_to_num() -> x * 1
relu that forgets NaN: x.relu() -> torch.where(x > 0, x, 0.0)
exponential of a logarithm: x.log().exp() -> x * 1
square of a root: x.sqrt() ** 2 -> x * 1
root of a square: (x * x).sqrt() -> x * 1
sum with zero: x + 0.0 -> x.clone()
reciprocal of a sum with zero: 1 / (x + 0.0) -> 1 / x
sign by a quotient: x.sign() -> x / x.abs()
clamp the other way: x.clamp_min(1.0).clamp_max(-1.0) -> x.clamp_max(-1.0).clamp_min(1.0)
ties of argmax: x.argmax(-1) -> x.shape[-1] - 1 - x.flip(-1).argmax(-1)
sort the other way: x.sort(-1).values -> x.sort(-1, descending=True).values
another diagonal: x.tril(1) -> x.tril(0)
exclusive sum: x.cumsum(-1) -> x.cumsum(-1) - x
padding on the other side: F.pad(x, (1, 0)) -> F.pad(x, (0, 1))
softmax unsafe: x.softmax(-1) -> x.exp() / x.exp().sum(-1, True)
logsumexp unsafe: x.logsumexp(-1) -> x.exp().sum(-1).log()
log_softmax unsafe: x.log_softmax(-1) -> x.softmax(-1).log()
logsigmoid unsafe: F.logsigmoid(x) -> x.sigmoid().log()
softplus unsafe: F.softplus(x) -> (1 + x.exp()).log()
tanh by exponentials: x.tanh() -> (x.exp() - (-x).exp()) / (x.exp() + (-x).exp())
variance by squares: x.var(-1, correction=0) -> (x * x).mean(-1) - x.mean(-1) ** 2
layer norm by squares: norm(x)
    -> (x - x.mean(-1, True)) / ((x * x).mean(-1, True) - x.mean(-1, True) ** 2 + 1e-05).sqrt()
expm1: x.expm1() -> x.exp() - 1
keepdim: x / x.abs().sum(-1, True) -> x / x.abs().sum(-1)
broadcast swapped: x[:, None] - x[None] -> x[None] - x[:, None]
eps forgotten: x * (x.pow(2).mean(-1, True) + 1e-06).rsqrt() -> x * x.pow(2).mean(-1, True).rsqrt()
eps outside: x * (x.pow(2).mean(-1, True) + 1e-05).rsqrt() -> x * (x.pow(2).mean(-1, True).rsqrt() + 1e-05)
maximum times negative: (x * -2).amax(-1) -> x.amax(-1) * -2
relu times negative: (x * -2).relu() -> x.relu() * -2
leaky slope over one: F.leaky_relu(x, 2.0) -> torch.maximum(x, x * 2)
unused draw: (torch.rand_like(x), x * torch.rand_like(x))[1] -> x * torch.rand_like(x)
padding of max_pool: F.max_pool1d(x[None], 3, 1, 1) -> F.max_pool1d(F.pad(x[None], (1, 1)), 3, 1)
unsigned cast: x.abs().to(torch.uint8) -> x.to(torch.uint8)
round half up: x.mul(2).round() -> x.mul(2).add(0.5).floor()
fmod for remainder: x.fmod(1.5) -> x.remainder(1.5)
bool sum: ((x > 0) + (x > 1)).float() -> (x > 0).float() + (x > 1).float()
tanh by sigmoid, near zero: x.tanh() -> 2 * (2 * x).sigmoid() - 1
== qkv: 1x4x6x8 1x2x6x8 1x2x6x8
heads tiled in place of repeated: attend()(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    -> attend()(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
== x: 6x4
reshape for transpose: x.transpose(0, 1).reshape(4, 6) -> x.reshape(4, 6)
== x: 2x6x8
heads in another order: x.view(2, 6, 4, 2).transpose(1, 2) -> x.view(2, 4, 6, 2)
== xwb: 6x4 6x4 6
lost bias: F.linear(x, w, b) -> F.linear(x, w) + 0 * b
== qkv: 1x2x1024x16 1x2x1024x16 1x2x1024x16
narrow window: attend(lambda q, k: (k <= q) & (q - k < 512))(q, k, v)
    -> attend(lambda q, k: (k <= q) & (q - k < 511))(q, k, v)
wide window: attend(lambda q, k: (k <= q) & (q - k < 512))(q, k, v)
    -> attend(lambda q, k: (k <= q) & (q - k <= 512))(q, k, v)
window of half its width: attend(lambda q, k: (k <= q) & (q - k < 512))(q, k, v)
    -> attend(lambda q, k: (k <= q) & (q - k < 256))(q, k, v)
== mask: 1024x1024
window that is as wide as most: q - k < 1000 -> q - k < 1 << 20
late position: (k < 900) | (q < 3) -> (k < 901) | (q < 3)
blocks of another size: q // 128 == k // 128 -> q // 64 == k // 64
blocks that begin later: q // 128 == k // 128 -> (q + 1) // 128 == (k + 1) // 128
every n-th: (q - k) % 128 == 0 -> (q - k) % 127 == 0
== mask: 512x512
or for and: (k <= q) & (q - k < 100) -> (k <= q) | (q - k < 100)
== mask: 6x6 dynamic
mask of large sizes forgotten: k < 100 -> k >= 0
window only at large sizes: k <= q -> (k <= q) & (q - k < 100000)
sink lost: (k <= q) & ((q - k < 70) | (k < 4)) -> (k <= q) & (q - k < 70)
chunk boundary: q // 48 == k // 48 -> (q - k < 48) & (k <= q) | (q // 48 == k // 48)
bottom of window: (q - k < 40) & (k - q < 40) -> (q - k < 40) & (k - q <= 40)
== mask: 8x8 dynamic
window of large sizes forgotten: q - k < 64 -> q - k < 65
== xy: 16x64 16x64 bfloat16
lost cast to float32: (x.float() - x.float().mean(-1, True)).bfloat16() -> x - x.mean(-1, True)
products in bfloat16: (x.float() * y.float()).sum(-1) -> (x * y).float().sum(-1)
accumulation in bfloat16: x.float().cumsum(-1) -> x.cumsum(-1).float()
other dtype: x.float() * 2 -> x * 2
softmax in bfloat16: x.softmax(-1, dtype=torch.float32) -> x.softmax(-1).float()
one element tensor: x * torch.tensor([2.0]) -> x * 2
== x: 8x64 float16
mean in float16: x.float().pow(2).mean(-1) -> x.pow(2).mean(-1).float()
== x: 64x64
lost cast to float64: (x.double() - x.double().mean()).float() -> x - x.mean()
== x: 8x8 int64
trunc for floor: x // 3 -> torch.div(x, 3, rounding_mode='trunc')
fmod for remainder: x % 3 -> torch.fmod(x, 3)
bits for remainder: torch.fmod(x, 8) -> x & 7
negated quotient: -x // 2 -> -(x // 2)
not of a number: ~x -> -x
whole numbers in float32: x * 3 -> (x.float() * 3).long()
truncated shift: torch.div(x, 2, rounding_mode='trunc') -> x >> 1
float32 round trip: x * 1 -> x.float().long()
== x: 8x8 int8
doubled and halved: x * 2 // 2 -> x * 1
next is larger: x + 1 > x -> x == x
sum that wraps: x.sum(-1) -> x.sum(-1, dtype=torch.int8).long()
absolute is not negative: x.abs() >= 0 -> x == x
== xy: 8x8 8x8 int8
product that wraps: x.int() * y.int() -> (x * y).int()
== xy: 8x8 8x8 uint8
unsigned difference: (x - y).int() -> x.int() - y.int()
== xy: 8x8 8x8 int64
quotients of a sum: x // 2 + y // 2 -> (x + y) // 2
== xy: 6x6 6x6 grad
gradient through detach: x.detach() * y + x -> x * y + x
lost gradient: x * y + x -> x * y.detach() + x
lost gradient where results are no numbers: x.sqrt() + y -> (x.sqrt() + y).masked_fill(x < 0, math.nan)
gradient through no_grad: no_grad(x, y) -> y * x.sum() + x
detached factor: (x @ y) * (x @ y).detach() -> (x @ y) * (x @ y)
maximum with ties: torch.where(x > y, x, y) -> torch.maximum(x, y)
== qkv: 2x6x8 2x6x8 2x6x8 grad finite_inputs
lost gradient where all is filled: filled()(q, k, v) -> filled(2)(q, k, v)
== qkv: 2x6x8 2x6x8 2x6x8 grad finite_inputs fill_hides
lost gradient of what is seen: filled()(q, k, v) -> filled(2, lambda q: q.detach())(q, k, v)
another gradient of what is seen: filled()(q, k, v) -> filled(2, lambda q: 1.5 * q - 0.5 * q.detach())(q, k, v)
lost gradient where all rows are filled: filled(0, unseen=6)(q, k, v) -> filled(6, unseen=6)(q, k, v)
== x: 6x6 grad
straight through: straight_through(x) -> x.round() + 0 * x
clamp by two with ties: x.clamp(0, 1) -> torch.minimum(torch.maximum(x, torch.zeros(())), torch.ones(()))
relu by a maximum: x.relu() -> torch.maximum(x, torch.zeros(()))
amax for max: x.max(-1).values -> x.amax(-1)
norm by a root: x.norm(dim=-1) -> x.pow(2).sum(-1).sqrt()
absolute by a root: x.abs() -> x.pow(2).sqrt()
result detached: x * 2 -> (x * 2).detach()
relu by a clamp: x.relu() -> x.clamp_min(0)
== x: 5x6 dynamic
size of the first call: x.sum(-1) / x.shape[-1] -> x.sum(-1) / 6
== x: 6x5 dynamic
last element of the first call: x[:, -1] * 2 -> x[:, 4] * 2
== x: 5x9 dynamic
scale of the first call: x @ x.mT / x.shape[-1] ** 0.5 -> x @ x.mT / 9 ** 0.5
length behind a number: x * min(x.shape[0], 50) -> x * x.shape[0]
== qkvm: 2x4x6x8 2x4x6x8 2x4x6x8 2x1x6x6:bool
empty rows: (q @ k.mT / 8 ** 0.5).masked_fill(~m, -INF).softmax(-1) @ v -> F.scaled_dot_product_attention(q, k, v, m)
== qkv: 2x4x6x8 2x4x9x8 2x4x9x8 dynamic
causal aligned to the other corner: corner(False)(q, k, v) -> corner(True)(q, k, v)
causal aligned to the first corner: corner(True)(q, k, v) -> F.scaled_dot_product_attention(q, k, v, is_causal=True)
== x: 7x6 dynamic
chunk by splits: x.chunk(3)[1].sum(0) -> x.tensor_split(3)[1].sum(0)
half rounded down: x[:(x.shape[0] + 1) // 2].sum(0) -> x[:x.shape[0] // 2].sum(0)
mean by the other size: x.mean(0) -> x.sum(0) / x.shape[1]
every second: x[::2].sum(0) * x.shape[0] -> x[::2].sum(0) * (x.shape[0] // 2 * 2)
== xs: 5x6 0.25 dynamic
number of the first call: x * s -> x * 0.25
number that is not negative: (x * s).amax(-1) -> x.amax(-1) * s
number behind a norm: F.normalize(x * s) -> F.normalize(x)
numbers exchanged: x * s + s ** 2 -> (x + s) * s ** 2
== qkvs: 2x4x6x8 2x4x6x8 2x4x6x8 0.25 dynamic
scale of the first call of attention: (q @ k.mT * s).softmax(-1) @ v -> sdpa(scale=0.25)(q, k, v)
scale by the size alone: (q @ k.mT * s).softmax(-1) @ v -> sdpa()(q, k, v)
scale twice: (q @ k.mT * s).softmax(-1) @ v -> F.scaled_dot_product_attention(q * s, k, v, scale=s)
scale behind the softmax: (q @ k.mT * s).softmax(-1) @ v -> sdpa(scale=1.0)(q, k, v) * s
dropout behind a number: F.dropout((q @ k.mT * s).softmax(-1), 0.1) @ v
    -> F.scaled_dot_product_attention(q * s, k, v, scale=1.0)
== qkvs: 2x4x6x8 2x2x6x8 2x2x6x8 0.25 dynamic
heads of symbols tiled: (q @ k.repeat_interleave(2, 1).mT * s).softmax(-1) @ v.repeat_interleave(2, 1)
    -> F.scaled_dot_product_attention(q * s, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), scale=1.0)
== qkvms: 2x4x6x8 2x4x6x8 2x4x6x8 2x6:bool 0.25 dynamic
padding forgotten: ((q @ k.mT) * s).masked_fill(~m[:, None, None], -INF).softmax(-1) @ v
    -> F.scaled_dot_product_attention(q * s, k, v, scale=1.0)
padding of queries: ((q @ k.mT) * s).masked_fill(~m[:, None, None], -INF).softmax(-1) @ v
    -> F.scaled_dot_product_attention(q * s, k, v, m[:, None, :, None], scale=1.0)
== qkv: 2x4x6x8 2x4x6x8 2x4x6x8 dynamic
causal of symbols forgotten: attend(lambda q, k: k <= q)(q, k, v) -> attend()(q, k, v)
window of symbols too wide: attend(lambda q, k: (k <= q) & (q - k < 40))(q, k, v)
    -> attend(lambda q, k: (k <= q) & (q - k <= 40))(q, k, v)
window of symbols forgotten: attend(lambda q, k: (k <= q) & (q - k < 40))(q, k, v)
    -> attend(lambda q, k: k <= q)(q, k, v)
scale of one size of heads: attend()(q, k, v) -> sdpa()(q, k, v)
== x: 32x33 dynamic
number of parts of the first call: (x[:x.shape[0] // 8 * 8].sum(0) if x.shape[0] // 8 > 2 else x[0]) -> x[:32].sum(0)
== x: 16x64 float16
root mean square in float16: x.float().pow(2).sum(-1).sqrt().half() -> x.pow(2).sum(-1).sqrt()
scale behind square: (x * 0.01).pow(2).sum(-1) -> x.pow(2).sum(-1) * 0.0001
norm in float16: x * x.float().pow(2).mean(-1, True).rsqrt().half() -> x * x.pow(2).mean(-1, True).rsqrt()
== xy: 16x64 64x16 float16
scale behind the product: (x / 64) @ (y / 64) -> (x @ y) / 4096
== x: 2x3x4x4
groups of channels: F.group_norm(x, 3) -> F.group_norm(x, 1)
== xy: 6x6 6
sign of the factor forgotten: (x * y[0]).relu() -> x.relu() * y[0]
maximum with a factor: (x * y[0]).amax(-1) -> x.amax(-1) * y[0]
root of a factor: (x.abs() * y[0] ** 2).sqrt() -> x.abs().sqrt() * y[0]
== x: 8x8 int32
sum keeps dtype: x.sum(0) -> x.sum(0, dtype=torch.int32)
== x: 8x8 uint8
average: ((x.int() + 1) // 2).to(torch.uint8) -> (x + 1) // 2
== xy: 8x8:bool 8x8:bool
sum of bools: x.int() + y.int() -> (x + y).int()
== xiw: 6x6 6:int64 6
scatter duplicates: x.index_add(0, i, x) -> x.index_put((i,), x[i] + x)
offset of index: x[i] * 1 -> x[i - 1] * 1
ignore index: F.cross_entropy(x, i, ignore_index=0) -> F.cross_entropy(x, i)
== wi: 6x6 6:int64 grad
padding index: F.embedding(i, w, padding_idx=0) -> F.embedding(i, w)
== xmv: 8x6 6 6
running statistics lost: F.batch_norm(x, m, v, training=True)
    -> F.batch_norm(x, None, None, training=True) + 0 * m * v
== x: 6x6
softmax same size other dim in 3d: x[None].softmax(1) -> x[None].softmax(2)
cumsum over other dim: x.cumsum(0) -> x.cumsum(1)
flip of the other dim: x.flip(0) -> x.flip(1)
negative step: x[:, ::2].flip(1) -> x.flip(1)[:, ::2]
negative offset diag: x.diagonal(1) -> x.diagonal(-1)
as_strided offset: x.as_strided((4,), (7,)) * 1 -> x.as_strided((4,), (7,), 1) * 1
roll by two dims: x.roll((1, 2), (0, 1)) -> x.roll((2, 1), (0, 1))
nansum for sum: x.sum(-1) -> x.nansum(-1)
nanmean kept: x.nan_to_num(0.0).sum() -> x.sum()
isinf only positive: x.isinf() -> x == INF
posinf replaced: x.nan_to_num(nan=0.0, posinf=1.0) -> x.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)
max forgets NaN: x.amax(-1) -> torch.where(x.isnan(), -INF, x).amax(-1)
where of a division: torch.where(x > 0, 1 / x, 0.0) -> torch.where(x > 0, 1 / x.clamp_min(0.1), 0.0)
atan2 quadrant: torch.atan2(x, x.flip(0)) -> (x / x.flip(0)).atan()
hardtanh inner edges: F.hardshrink(x, 0.5) -> F.softshrink(x, 0.5)
threshold ties: F.threshold(x.round(), 1.0, 0.0) -> torch.where(x.round() >= 1.0, x.round(), 0.0)
round to decimals: x.round(decimals=1) -> (x * 10).floor() / 10
median upper: x.median(-1).values -> x.sort(-1).values[:, 3]
argmin ties: x.round().argmin(-1) -> 5 - x.round().flip(-1).argmin(-1)
topk unsorted ties: x.topk(3).values -> x.sort(-1).values[:, -3:]
searchsorted side: torch.searchsorted(torch.tensor([0.0, 1.0]), x.round())
    -> torch.searchsorted(torch.tensor([0.0, 1.0]), x.round(), right=True)
bucketize right: torch.bucketize(x.round(), torch.tensor([0.0, 1.0]))
    -> torch.bucketize(x.round(), torch.tensor([0.0, 1.0]), right=True)
bernoulli for uniform: x * torch.bernoulli(torch.full_like(x, 0.5)) -> x * (torch.rand_like(x) < 0.5)
integers, then uniform: drawn('integers', 'uniform')(x) -> drawn('uniform', 'integers')(x)
permutation, then uniform: drawn('permutation', 'uniform')(x) -> drawn('uniform', 'permutation')(x)
rows one by one: shifted(False)(x) -> shifted(True)(x)
integer times half promotes: x * torch.tensor(2, dtype=torch.int64) -> (x.half() * 2).float()
scatter that reduces: x.scatter_add(0, torch.zeros(1, 6, dtype=torch.long), x)
    -> x.scatter(0, torch.zeros(1, 6, dtype=torch.long), x)
scatter of another index: torch.zeros(6, 6).scatter_add(0, torch.tensor([[0, 0, 1, 1, 2, 2]] * 6), x)
    -> torch.zeros(6, 6).scatter_add(1, torch.tensor([[0, 0, 1, 1, 2, 2]] * 6), x)
std of one: x[:, :1].std(-1, correction=0) -> x[:, :1].std(-1)
var over the other axis: x.var(0) -> x.var(1)
prod and sum of logs: x.prod(-1) -> x.log().sum(-1).exp()
diag embed offset: torch.diag_embed(x, 1) -> torch.diag_embed(x, -1)
tril of last dims: x.view(6, 2, 3).tril() -> x.tril().view(6, 2, 3)
avg pool counts pad: F.avg_pool1d(x[None], 3, 2, 1) -> F.avg_pool1d(x[None], 3, 2, 1, count_include_pad=False)
align corners: F.interpolate(x[None], 9, mode='linear') -> F.interpolate(x[None], 9, mode='linear', align_corners=True)
nearest exact: F.interpolate(x[None], 4, mode='nearest') -> F.interpolate(x[None], 4, mode='nearest-exact')
reflect for replicate: F.pad(x[None], (2, 2), mode='reflect') -> F.pad(x[None], (2, 2), mode='replicate')
log1p for log: (1 + x.abs()).log() * 0 + x.abs().log1p() -> (1 + x.abs()).log()
complex conj forgotten: torch.view_as_real(torch.view_as_complex(x.view(6, 3, 2)).conj() * 1)
    -> torch.view_as_real(torch.view_as_complex(x.view(6, 3, 2)) * 1)
huber delta: F.smooth_l1_loss(x, x.flip(0), beta=0.5) -> F.huber_loss(x, x.flip(0), delta=0.5)
cross entropy mean with weights: F.cross_entropy(x, torch.arange(6), weight=torch.arange(6.0))
    -> F.cross_entropy(x, torch.arange(6), weight=torch.arange(6.0), reduction='sum') / 6
ignored index: F.cross_entropy(x, torch.tensor([0, 1, 2, 3, -100, 5]))
    -> F.cross_entropy(x, torch.tensor([0, 1, 2, 3, -100, 5]), reduction='sum') / 6
label smoothing lost: F.cross_entropy(x, torch.arange(6), label_smoothing=0.1) -> F.cross_entropy(x, torch.arange(6))
instance norm for layer norm: F.instance_norm(x[None]) -> F.layer_norm(x[None], (6, 6))
gather of other dim: x.gather(0, torch.tensor([[0, 1, 2, 3, 4, 5]] * 6).flip(1))
    -> x.gather(1, torch.tensor([[0, 1, 2, 3, 4, 5]] * 6).flip(1))
dropout, then uniform: drawn('dropout', 'uniform')(x) -> drawn('uniform', 'dropout')(x)
normal in place, then uniform: drawn('normal', 'uniform')(x) -> drawn('uniform', 'normal')(x)
== xy: 6x6 6x6
duplicates that accumulate: written(x, y, 0, 1, 0) -> written(x, y, 0, 1, 0, accumulate=True)
duplicates that are read first: written(x, y, 0, 1, 0, accumulate=True) -> added(x, y, 0, 1, 0)
view that is read behind a write: row(False)(x, y) -> row(True)(x, y)
write through transpose: x.t().add_(y) * 1 -> x.add_(y) * 1
where broadcast of rows: torch.where(x[0] > 0, x, y) -> torch.where(x[0][:, None] > 0, x, y)
addcdiv sign: torch.addcdiv(x, y, x, value=-0.5) -> torch.addcdiv(x, y, x, value=0.5)
lerp weight: torch.lerp(x, y, 0.3) -> torch.lerp(y, x, 0.3)
copysign: torch.copysign(x, y) -> x.abs() * y.sign()
logaddexp naive: torch.logaddexp(x, y) -> (x.exp() + y.exp()).log()
xlogy at zero: torch.xlogy(x, y) -> x * y.log()
remainder sign: torch.remainder(x, y) -> torch.fmod(x, y)
floor divide: torch.floor_divide(x, y) -> (x / y).trunc()
cosine eps: F.cosine_similarity(x, y) -> (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1))
outer order: torch.einsum('ij,kj->ik', x, y) -> torch.einsum('ij,kj->ki', x, y)
kron order: torch.kron(x, y) -> torch.kron(y, x)
== x: 5x7 dynamic
mean by numel at first call: x.mean() -> x.sum() / 35
mean of rows over sum of both: x.mean(1) -> x.sum(1) / (x.shape[0] + 2)
flattened other order: x.t().reshape(-1) -> x.reshape(-1)
last of an odd half: x[x.shape[0] // 2:].sum(0) -> x[-(x.shape[0] // 2):].sum(0)
correction of a variance: x.var(-1) -> x.var(-1, correction=0) * (x.shape[1] / (x.shape[0] + 1))
clamped size: x[:, :6].sum(1) -> x[:, :-1].sum(1)
roll by half: x.roll(x.shape[1] // 2, 1) -> x.roll(-(x.shape[1] // 2), 1)
linspace: x * torch.linspace(0, 1, x.shape[1]) -> x * torch.arange(x.shape[1]) / 7
eye of rectangles: x * torch.eye(x.shape[0], x.shape[1]) -> x * (torch.arange(x.shape[1])[None] == 2)
== x: 6x6 dynamic
softmax over equal sizes: x.softmax(0) -> x.softmax(1)
mean over the equal size: x.sum(0) / x.shape[0] -> x.sum(1) / x.shape[0]
== x: 8x8 int64
division rounds: torch.div(x, 3, rounding_mode='floor') -> (x / 3).round().long()
mean of whole numbers: x.sum(0) // 8 -> torch.div(x.sum(0), 8, rounding_mode='trunc')
shift past sign: x >> 1 -> x // 2 + (x < 0)
square root of whole numbers: (x * x).float().sqrt().long() -> x.abs() + (x.abs() > 100000000)
even test: x % 2 == 1 -> torch.fmod(x, 2) == 1
middle: (x + x.flip(0)) // 2 -> x + (x.flip(0) - x) // 2 + (x == 9223372036854775807)
== x: 8x8 int8
negation of the least: -x > 0 -> x < 0
square in int8: (x * x).float() -> x.float() * x.float()
mean in int8: x.float().mean() -> x.sum(dtype=torch.int8).float() / 64
shift left: (x << 1) >> 1 -> x * 1
== x: 8x8 int32
to float and back: x + 1 -> (x.float() + 1).int()
product promoted: (x * 100000).long() -> x.long() * 100000
== xy: 8x8 8x8 bfloat16
early cast: x.float().exp().bfloat16() -> x.exp() * 1.0078125
residual in bf16: x + y.float() -> (x + y).float()
== x: 6x6 grad
abs at zero: x.abs() -> torch.where(x >= 0, x, -x)
prod at zeros: x.relu().prod(-1) -> x.relu().cumprod(-1)[:, -1].detach() + 0 * x.sum(-1)
sqrt safe: x.clamp_min(0).sqrt() -> torch.where(x > 0, x.clamp_min(0), 0.0).sqrt() + x * 0
leaky at zero: F.leaky_relu(x, 0.1) -> torch.where(x >= 0, x, x * 0.1)
clamp edges: x.clamp(-1, 1) -> F.hardtanh(x)
== x: 5x1x3 dynamic
squeeze of another: x.squeeze(1) * 1 -> x.transpose(1, 2).squeeze(2) * 2
== qkv: 2x4x6x8 2x4x9x8 2x4x9x8 dynamic
queries before every key: corner(True)(q, k, v)
    -> sdpa(attn_mask=torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    .tril(k.shape[-2] - q.shape[-2]))(q, k, v)
""")

RIGHT: list[Rule] = _rules("""
== qkv: 2x4x6x8 2x4x6x8 2x4x6x8
sdpa: attend()(q, k, v) -> sdpa()(q, k, v)
scale in the queries: attend()(q, k, v) -> attend(scale=1.0)(q * 8 ** -0.5, k, v)
scale in both: attend()(q, k, v) -> attend(scale=1.0)(q * 8 ** -0.25, k * 8 ** -0.25, v)
mask by tril: attend(lambda q, k: k <= q)(q, k, v) -> sdpa(is_causal=True)(q, k, v)
dropout in attention: attend(drop=0.1)(q, k, v) -> sdpa(dropout_p=0.1)(q, k, v)
causal of a square: corner(True)(q, k, v) -> F.scaled_dot_product_attention(q, k, v, is_causal=True)
heads one by one: sdpa()(q, k, v)
    -> torch.cat([sdpa()(a, b, c) for a, b, c in zip(q.split(1, 1), k.split(1, 1), v.split(1, 1))], 1)
blocks of queries: sdpa()(q, k, v) -> torch.cat([sdpa()(q[:, :, :2], k, v), sdpa()(q[:, :, 2:], k, v)], -2)
permuted keys: sdpa()(q, k, v) -> sdpa()(q, k.flip(-2), v.flip(-2))
== x: 6x6
softmax with a maximum: x.softmax(-1)
    -> (x - x.amax(-1, True)).exp() / (x - x.amax(-1, True)).exp().sum(-1, keepdim=True)
softmax by hand: x.exp() / x.exp().sum(-1, keepdim=True) -> x.softmax(-1)
log-softmax: x - x.logsumexp(-1, True) -> x.log_softmax(-1)
sum of sums: x.sum() -> x.sum(0).sum(0)
sum by a product: x.sum(-1) -> x @ torch.ones(6)
mean by a sum: x.mean(-1) -> x.sum(-1) * (1 / 6)
division by a power of two: x / 8 -> x * 0.125
reciprocal: x / 3 -> x * (1 / 3)
root: 1 / (x.abs() + 1).sqrt() -> (x.abs() + 1).rsqrt()
layer norm: norm(x) -> F.layer_norm(x, (6,))
rms norm: x * (x.pow(2).mean(-1, True) + 1e-06).rsqrt() -> F.rms_norm(x, (6,), eps=1e-06)
sigmoid: 1 / (1 + (-x).exp()) -> x.sigmoid()
silu: x * x.sigmoid() -> F.silu(x)
gelu by its formula: F.gelu(x) -> 0.5 * x * (1 + torch.erf(x * 0.5 ** 0.5))
logarithm of an exponential: x.exp().log() -> x * 1
exponential of a logarithm: (x.abs() + 1).log().exp() -> x.abs() + 1
powers of two: x.exp() -> (x * math.log2(math.e)).exp2()
split and cat: torch.cat(x.split(2, -1), -1) -> x.clone()
two transpositions: x.t().t() * 2 -> x * 2
flipped twice: x.flip(0).flip(0) -> x.clone()
roll by cat: x.roll(1, 1) -> torch.cat([x[:, -1:], x[:, :-1]], 1)
repeat by expand: x.repeat_interleave(2, 0) -> x[:, None].expand(6, 2, 6).reshape(12, 6)
permuted and back: x.view(2, 3, 6).permute(2, 0, 1).reshape(6, 6) * 2 -> x.t() * 2
window by two diagonals: x.tril().triu(-2)
    -> torch.where(((i := torch.arange(6)) <= i[:, None]) & (i[:, None] - i <= 2), x, 0.0)
draws that stay in order: torch.rand_like(x) * 2 + torch.randn_like(x) + x
    -> x + torch.rand_like(x) * 2 + torch.randn_like(x)
writes to other rows: torch.stack([x[0] * 2, x[1] * 3]) -> torch.cat([x[:1] * 2, x[1:2] * 3])
detach of no gradient: x.detach() * 2 -> x * 2
relu by a maximum: x.relu() -> torch.maximum(x, torch.zeros(()))
clamp by two: x.clamp(-1, 1) -> x.clamp_min(-1).clamp_max(1)
largest by a sort: x.amax(-1) -> x.sort(-1).values[..., -1].contiguous()
negative scale of a maximum: (x * -2).amax(-1) -> x.amin(-1) * -2
relu of a positive scale: (x * 2).relu() -> x.relu() * 2
leaky: F.leaky_relu(x, 0.1) -> torch.maximum(x, x * 0.1)
dropout of nothing: F.dropout(x, 0.0) * 2 -> x * 2
dropout at rest: F.dropout(x, 0.5, training=False) * 2 -> x * 2
sigmoid by tanh: x.sigmoid() -> 0.5 * (x * 0.5).tanh() + 0.5
one minus sigmoid: 1 - x.sigmoid() -> (-x).sigmoid()
safe softplus: F.softplus(x) -> x.clamp_min(0) + (-x.abs()).exp().log1p()
max pool: F.max_pool1d(x[None], 3, 1, 1) -> F.max_pool1d(F.pad(x[None], (1, 1), value=-INF), 3, 1)
unfold: F.avg_pool1d(x[None], 2) -> x.view(1, 6, 3, 2).mean(-1)
count: (x > 0).sum(-1) -> (x > 0).int().sum(-1)
any: (x > 0).any(-1) -> (x > 0).sum(-1) > 0
power: x ** 3 -> x * x * x
mean square: x.pow(2).mean(-1).sqrt() -> x.norm(dim=-1) / 6 ** 0.5
== xy: 6x6 6x6
sum in another order: x + y + x * y -> x + (y + x * y)
products in another order: x @ y @ x -> x @ (y @ x)
factor taken out: x * y + x * x -> x * (y + x)
transposed product: (x @ y).t().clone(memory_format=torch.contiguous_format) -> y.t() @ x.t()
einsum: torch.einsum('ij,kj->ik', x, y) -> x @ y.t()
stack by cat: torch.stack([x, y]) -> torch.cat([x[None], y[None]])
write as a sum: x.clone().add_(y) * 2 -> (x + y) * 2
writes to parts: torch.cat([y[:2], x[2:]]) -> x.clone().index_copy_(0, torch.arange(2), y[:2])
minimum by maximum: torch.minimum(x, y) -> -torch.maximum(-x, -y)
where of not: torch.where(x > 0, x, y) -> torch.where(~(x > 0), y, x)
== xw: 2x3x4 4x5
batched product as one: x @ w -> (x.reshape(-1, 4) @ w).view(2, 3, 5)
== xab: 2x4 3x4 3x4
merged projections: x @ a.t() * (x @ b.t()) -> torch.mul(*(x @ torch.cat([a, b]).t()).chunk(2, -1))
== x: 3x5x7 dynamic
reshape of symbols: x.reshape(-1, x.shape[-1]).sum(0) -> x.sum((0, 1))
flatten of symbols: x.flatten(1) * 2 -> (x * 2).reshape(x.shape[0], x.shape[1] * x.shape[2])
== x: 5x6 dynamic
mean of symbols: x.mean(-1) -> x.sum(-1) / x.shape[-1]
== x: 6x5 dynamic
last of symbols: x[:, -1] * 2 -> x.select(1, x.shape[1] - 1) * 2
== x: 2x4x6x8 dynamic
attention of symbols: causal(x) -> F.scaled_dot_product_attention(x, x, x, is_causal=True)
== x: 5x9 dynamic
what a guard says: x[:100].sum(0) -> x.sum(0)
== x: 8x5 dynamic
split by the middle: x[:x.shape[0] // 2].sum(0) + x[x.shape[0] // 2:].sum(0) -> x.sum(0)
== mask: 64x64
negated mask: ~(k > q) -> q >= k
== mask: 512x512
laws of De Morgan: ~((k > q) | (q - k > 100)) -> (k <= q) & (q - k <= 100)
window that hides nothing: (k <= q) & (q - k < 4096) -> k <= q
== mask: 1024x1024
strict for not strict: q - k < 512 -> q - k <= 511
blocks by their bounds: q // 128 == k // 128 -> (q - q % 128 <= k) & (k < q - q % 128 + 128)
== mask: 6x6 dynamic
mask of large sizes: k < 100 -> ~(k > 99)
distribution: (k <= q) & ((q - k < 70) | (k < 4)) -> ((k <= q) & (q - k < 70)) | ((k <= q) & (k < 4))
chunk: (q // 48 == k // 48) & (k <= q) -> (k <= q) & (k >= q // 48 * 48)
always true part: (k <= q) | (k < 0) -> k <= q
two conditions: (q - k < 40) & (k - q < 40) -> (q - k).abs() < 40
not both: ~((k > q) | (k < 3)) -> (k <= q) & (k > 2)
== x: 8x8 int64
floor by a shift: x // 8 -> x >> 3
remainder by bits: x % 8 -> x & 7
floor: torch.div(x, 2, rounding_mode='floor') -> x >> 1
negative remainder: x - x // 5 * 5 -> x % 5
== xy: 8x8 8x8 int8
wrapping products: (x + y) * 3 -> x * 3 + y * 3
== x: 8x8 int8
negated number: -x -> ~x + 1
== x: 8x8 uint8
doubled: x * 2 -> x + x
half: x // 2 -> x >> 1
widened: x.int() * 2 -> x.int() << 1
== xy: 16x64 16x64 bfloat16
upcast of a product: x * y -> (x.float() * y.float()).bfloat16()
upcast of a norm: x - x.mean(-1, True) -> (x.float() - x.float().mean(-1, True)).bfloat16()
one cast of two: x.float().double() -> x.double()
softmax in float32: x.softmax(-1) -> x.softmax(-1, dtype=torch.float32).bfloat16()
zero-dimensional: x * torch.tensor(2.0) -> x * 2
exact power of two: x * 0.5 -> (x.float() / 2).bfloat16()
== xy: 6x6 6x6 grad
gradient in another order: (x * y).sum(-1) * 2 -> (2 * x * y).sum(-1)
== xy: 6x6 6x6 grad finite_inputs
lost gradient where results are no numbers, as claimed: x.sqrt() + y -> (x.sqrt() + y).masked_fill(x < 0, math.nan)
== qkv: 2x6x8 2x6x8 2x6x8 grad finite_inputs fill_hides
lost gradient where all is filled, which weighs nothing: filled()(q, k, v) -> filled(2)(q, k, v)
== xy: 6x6 6x6 grad no_gradients
lost gradient that nobody asks for: x * y + x -> x * y.detach() + x
== x: 6x6 grad
gradient of a softmax: x.exp() / x.exp().sum(-1, keepdim=True) -> x.softmax(-1)
detached maximum: x.softmax(-1) -> (e := (x - x.amax(-1, True).detach()).exp()) / e.sum(-1, True)
amax of all: x.max() -> x.amax()
== qkv: 2x4x6x8 2x4x6x8 2x4x6x8 grad
gradient of attention: attend()(q, k, v) -> sdpa()(q, k, v)
== x: 6x6 finite_inputs rounding
claimed zeros: x * 0 -> torch.zeros_like(x)
== qkv: 2x4x6x8 2x4x9x8 2x4x9x8
tril of the other corner: corner(True)(q, k, v)
    -> sdpa(attn_mask=torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    .tril(k.shape[-2] - q.shape[-2]))(q, k, v)
== qkv: 2x4x6x8 2x4x9x8 2x4x9x8 dynamic
causal of the first corner: corner(False)(q, k, v) -> F.scaled_dot_product_attention(q, k, v, is_causal=True)
== qkv: 1x6x5x4 1x3x5x4 1x3x5x4
groups by expand: k.repeat_interleave(2, 1) * v.repeat_interleave(2, 1)
    -> (k * v)[:, :, None].expand(1, 3, 2, 5, 4).flatten(1, 2) * 1
groups enabled: sdpa()(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)) -> sdpa(enable_gqa=True)(q, k, v)
== x: 7x6 dynamic
halves: x.sum(0) -> x[:x.shape[0] // 2].sum(0) + x[x.shape[0] // 2:].sum(0)
numel: x.sum() / x.numel() -> x.mean()
== xs: 5x6 0.25 dynamic
quotient by a number: x / s -> x * (1 / s)
square of a number: x * s * s -> x * (s * s)
what a guard says of a number: x * (s if s < 1 else 1) -> x * s
negative number of a maximum: (x * -(s * s)).amax(-1) -> x.amin(-1) * -(s * s)
== qkvs: 2x4x6x8 2x4x6x8 2x4x6x8 0.25 dynamic
scale that is a number: (q @ k.mT * s).softmax(-1) @ v -> F.scaled_dot_product_attention(q, k, v, scale=s)
scale in the queries, a number: (q @ k.mT * s).softmax(-1) @ v
    -> F.scaled_dot_product_attention(q * s, k, v, scale=1.0)
== qkvs: 2x4x6x8 2x2x6x8 2x2x6x8 0.25 dynamic
groups of symbols: (q @ k.repeat_interleave(2, 1).mT * s).softmax(-1) @ v.repeat_interleave(2, 1)
    -> F.scaled_dot_product_attention(q * s, k, v, scale=1.0, enable_gqa=True)
== qkv: 2x4x6x8 2x4x6x8 2x4x6x8 dynamic
window of symbols: attend(lambda q, k: (k <= q) & (q - k < 40))(q, k, v)
    -> attend(lambda q, k: ~((q - k < 0) | (q - k > 39)))(q, k, v)
scale by the size: (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v -> sdpa()(q, k, v)
== x: 32x33 dynamic
size that a guard bounds: x[:x.shape[0] // 8 * 8].sum(0) if (x.shape[0] // 8) ** 2 == 16 else x[0] -> x[:32].sum(0)
== x: 16x64 float16
norm in float32: x * x.float().pow(2).mean(-1, True).add(1e-6).rsqrt().half()
    -> (x.float() * x.float().pow(2).mean(-1, True).add(1e-6).rsqrt()).half()
== xy: 8x8:bool 8x8:bool
implication: ~x | y -> ~(x & ~y)
== xiw: 6x6 6:int64 6
index add: torch.zeros(6).index_add(0, i, w) -> torch.zeros(6).index_put((i,), w, accumulate=True)
cross entropy: F.cross_entropy(x, i) -> F.nll_loss(x.log_softmax(-1), i)
== xmv: 8x6 6 6
batch norm: F.batch_norm(x, m, v.exp()) -> (x - m) * (v.exp() + 1e-05).rsqrt()
== x: 6x6 finite_inputs
cumsum by a product: x.cumsum(-1) -> x @ torch.ones(6, 6).triu()
flip of cumsum: x.flip(-1).cumsum(-1).flip(-1) -> x.sum(-1, True) - x.cumsum(-1) + x
stable: x.logsumexp(-1) -> (x - x.amax(-1, True)).exp().sum(-1).log() + x.amax(-1)
== xy: 6x6 6x6 finite_inputs rounding no_overflow
product rule: (x @ y).sum() -> (x.sum(0) * y.sum(1)).sum()
squares: (x - y).pow(2).sum(-1) -> x.pow(2).sum(-1) - 2 * (x * y).sum(-1) + y.pow(2).sum(-1)
exponential of a sum: (x + y).exp() -> x.exp() * y.exp()
== qkv: 2x4x6x8 2x4x6x8 2x4x6x8 no_overflow
division behind the product: attend()(q, k, v)
    -> (q @ k.mT * 8 ** -0.5).exp() @ v / (q @ k.mT * 8 ** -0.5).exp().sum(-1, keepdim=True)
== x: 6x6
transpose twice: x.t().t().sum(0) -> x.sum(0)
softmax of shifted: (x + 3).softmax(-1) * 1 -> (x + 3.0).softmax(-1)
flip before a sum: x.flip(0).amax(0) -> x.amax(0)
roll full circle: x.roll(6, 0) * 1 -> x * 1
diag by eye: x.diagonal() * 1 -> x.diag() * 1
triangles: x.tril() + x.triu(1) -> x + 0.0
gather as transpose: x.t()[0] * 1 -> x[:, 0] * 1
neg of neg: -(-x) -> x * 1
double: x + x -> 2 * x
quotient by two: x / 2 -> x * 0.5
square by a power: x ** 2 -> x * x
where of the same: torch.where(x > 0, x, x) -> x * 1
permuted max: x.t().amax(0) -> x.amax(1)
relu by one clamp: x.relu() -> x.clamp_min(0)
chunks: torch.cat(x.chunk(3), 0) -> x.clone()
stack of rows: torch.stack([x[i] for i in range(6)]) -> x.clone()
sign: (x > 0).float() - (x < 0).float() -> torch.where(x.isnan(), 0.0, x.sign())
one hot rows: F.one_hot(torch.arange(6), 6).float() @ x -> torch.eye(6) @ x
rows written: written(x, x[2:4], 0, 1) -> torch.cat([x[2:4], x[2:]])
include self: x.scatter_reduce(0, torch.zeros(6, 6, dtype=torch.long), x, 'amax')
    -> x.scatter_reduce(0, torch.zeros(6, 6, dtype=torch.long), x, 'amax', include_self=False)
ceil mode: F.max_pool1d(x[None], 2, 3, ceil_mode=True) -> F.max_pool1d(x[None], 2, 3)[..., :2]
== x: 6x6 grad
minimum of all shares its gradient: x.min() -> x.amin()
== x: 5x7 dynamic
mean by a size: x.mean(1) -> x.sum(1) / x.shape[1]
ceil half: x[:(x.shape[0] + 1) // 2] * 1 -> x[:-(-x.shape[0] // 2)] * 1
negative index: x[:, -1] * 1 -> x[:, x.shape[1] - 1] * 1
pad multiple: F.pad(x, (0, -x.shape[1] % 4)).sum(0) -> F.pad(x, (0, (4 - x.shape[1] % 4) % 4)).sum(0)
flatten: x.reshape(-1).sum() * 1 -> x.sum(0).sum() * 1
== x: 8x8 int64
even: x % 2 == 1 -> x & 1 == 1
remainder: x - x // 3 * 3 -> x % 3
shift: x >> 1 -> x // 2
negative of quotient: x // -1 -> -x
complement: ~x -> -x - 1
== x: 8x8 int8
wraps: (x + 1) - 1 -> x * 1
doubling: x + x -> x * 2
== qkvm: 1x6x8 1x6x8 1x6x8 1:int64 grad finite_inputs fill_hides
lost gradient where an input hides all: switched(True)(q, k, v, m) -> switched(False)(q, k, v, m)
== xy: 8x8 8x8 bfloat16
product by float: x * y -> (x.float() * y.float()).bfloat16()
sum by float: x + y -> (x.float() + y.float()).bfloat16()
scale by two: x * 2 -> (x.float() * 2).bfloat16()
max by float: torch.maximum(x, y) -> torch.maximum(x.float(), y.float()).bfloat16()
""")
