"""What the tests of FlexAttention share: programs, dense and as terms, and a backend that inserts them."""

import dataclasses
import math
from collections.abc import Callable

import torch

from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.attention.flex import FlexSpec, insert_flex
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Read, Scores

I64, F32, BOOL = torch.int64, torch.float32, torch.bool


@dataclasses.dataclass
class Form:
    """An attention program.

    Attributes:
        terms: from the four indices as terms, to the score and the mask; either may be None.
        tensors: what the program reads besides queries, keys and values, by sizes b, h, q, k, device and dtype.
        dense: from scaled scores [b, h, q, k], the four indices and the tensors, to scores with -inf where masked.
        grads: whether the tensors of floats get gradients in training.
        axes: what the indices of b, h, q and k are made of; by default one axis each.
    """

    terms: Callable
    dense: Callable
    tensors: Callable = lambda **_: ()
    grads: bool = False
    axes: Callable = lambda sizes: tuple((Axis(name, size),) for name, size in zip("bhqk", sizes, strict=True))


def at(*axes, start=0):
    return Position(axes, start)


def index(*axes, dtype=I64, start=0, step=1):
    return Index(dtype=dtype, position=at(*axes), start=start, step=step)


def number(value, dtype=I64):
    return Number(dtype=dtype, value=value)


def apply(op, *args, dtype=None):
    return Apply(dtype=dtype or args[-1].dtype, op=op, args=args)


def compare(op, *args):
    return apply(op, *args, dtype=BOOL)


def both(*terms):
    result = terms[0]
    for term in terms[1:]:
        result = compare("and", result, term)
    return result


def read(place, *positions, dtype=F32):
    return Read(dtype=dtype, value=place, at=positions)


def scores(dtype=F32):
    return Scores(dtype=dtype)


def causal_term(q, k):
    return compare("le", index(*k), index(*q))


def masked(s, keep):
    return torch.where(keep, s, -math.inf)


def softcap_term(cap):
    inner = apply("tanh", apply("div", scores(), number(cap, F32), dtype=F32))
    return apply("mul", inner, number(cap, F32), dtype=F32)


def slopes(h, device):
    return torch.exp2(-8.0 * torch.arange(1, h + 1, device=device) / h)


def documents(b, k, device):
    starts = torch.linspace(0, 3, k, device=device).floor()
    return torch.stack([(starts + i * (torch.arange(k, device=device) > k // 3)).long() for i in range(b)])


def ends_of_documents(b, q, k, device):
    """The first and the last key of the document that each query is in."""
    number = torch.arange(q, device=device) * 3 // q + torch.arange(b, device=device)[:, None]
    first = (number * k // (b + 2))[:, None]
    return first.int(), (first + k // (b + 2) - 1).int()


def lengths_mask(b, k, device):
    lengths = k - torch.arange(b, device=device) * (k // 4) - 1
    return torch.arange(k, device=device) < lengths[:, None]


def alibi_term(h, q, k):
    distance = apply("cast", apply("sub", index(*k), index(*q)), dtype=F32)
    return apply("add", scores(), apply("mul", read(0, at(*h)), distance))


def window(q, k, size):
    return both(causal_term(q, k), compare("lt", apply("sub", index(*q), index(*k)), number(size)))


FORMS = {
    "plain": Form(lambda b, h, q, k: (None, None), lambda s, b, h, q, k: s),
    "causal": Form(
        lambda b, h, q, k: (None, causal_term(q, k)),
        lambda s, b, h, q, k: masked(s, k <= q),
    ),
    "softcap": Form(
        lambda b, h, q, k: (softcap_term(5.0), causal_term(q, k)),
        lambda s, b, h, q, k: masked(torch.tanh(s / 5) * 5, k <= q),
    ),
    "alibi": Form(
        lambda b, h, q, k: (alibi_term(h, q, k), causal_term(q, k)),
        lambda s, b, h, q, k, m: masked(s + m[h] * (k - q), k <= q),
        lambda b, h, q, k, device, dtype: (slopes(h, device),),
    ),
    "document": Form(
        lambda b, h, q, k: (
            None,
            both(
                causal_term(q, k), compare("eq", read(0, at(*b), at(*q), dtype=I64), read(0, at(*b), at(*k), dtype=I64))
            ),
        ),
        lambda s, b, h, q, k, d: masked(s, (k <= q) & (d[b, q] == d[b, k])),
        lambda b, h, q, k, device, dtype: (documents(b, k, device),),
    ),
    "runs": Form(
        lambda b, h, q, k: (
            None,
            both(
                compare("ge", index(*k), read(0, at(*b), at(), at(*q), dtype=torch.int32)),
                compare("le", index(*k), read(1, at(*b), at(), at(*q), dtype=torch.int32)),
            ),
        ),
        lambda s, b, h, q, k, first, last: masked(s, (k >= first[b, 0, q]) & (k <= last[b, 0, q])),
        lambda b, h, q, k, device, dtype: ends_of_documents(b, q, k, device),
    ),
    "window": Form(
        lambda b, h, q, k: (None, window(q, k, 100)),
        lambda s, b, h, q, k: masked(s, (k <= q) & (q - k < 100)),
    ),
    "bottom_right": Form(
        lambda b, h, q, k: (None, compare("le", index(*k), index(*q, start=k[0].size - q[0].size))),
        lambda s, b, h, q, k: masked(s, k <= q + k.numel() - q.numel()),
    ),
    "padding": Form(
        lambda b, h, q, k: (None, both(causal_term(q, k), read(0, at(*b), at(), at(), at(*k), dtype=BOOL))),
        lambda s, b, h, q, k, m: masked(s, (k <= q) & m[b, 0, 0, k]),
        lambda b, h, q, k, device, dtype: (lengths_mask(b, k, device)[:, None, None],),
    ),
    "padding_alone": Form(
        lambda b, h, q, k: (None, read(0, at(*b), at(*k), dtype=BOOL)),
        lambda s, b, h, q, k, m: masked(s, m[b, k]),
        lambda b, h, q, k, device, dtype: (lengths_mask(b, k, device),),
    ),
    "bias": Form(
        lambda b, h, q, k: (
            apply("add", scores(), read(0, at(*h), at(*q), at(*k)), dtype=F32),
            None,
        ),
        lambda s, b, h, q, k, m: s + m[h, q, k],
        lambda b, h, q, k, device, dtype: (torch.randn(h, q, k, device=device),),
        grads=True,
    ),
    "learned": Form(
        # A learned cap, and learned slopes of which one tensor is read twice.
        lambda b, h, q, k: (
            apply(
                "add",
                apply(
                    "mul",
                    read(0, at(start=1)),
                    apply("tanh", apply("div", scores(), read(0, at(start=1)), dtype=F32)),
                    dtype=F32,
                ),
                apply(
                    "add",
                    apply(
                        "mul", read(1, at(*h)), apply("cast", apply("sub", index(*k), index(*q)), dtype=F32), dtype=F32
                    ),
                    read(1, at(start=0)),
                    dtype=F32,
                ),
                dtype=F32,
            ),
            causal_term(q, k),
        ),
        lambda s, b, h, q, k, c, m: masked(c[1] * torch.tanh(s / c[1]) + m[h] * (k - q) + m[0], k <= q),
        lambda b, h, q, k, device, dtype: (torch.tensor([1.0, 6.0], device=device), slopes(h, device)),
        grads=True,
    ),
}


def grid_axes(sizes):
    """Queries and keys on a grid with rows of 16; heads as groups of 2."""
    b, h, q, k = sizes
    return (
        (Axis("b", b),),
        (Axis("h0", h // 2), Axis("h1", 2)),
        (Axis("q0", q // 16), Axis("q1", 16)),
        (Axis("k0", k // 16), Axis("k1", 16)),
    )


FORMS["grid"] = Form(
    # Decomposed positions as in image models: a bias of rows and of columns, and a mask of neighbouring rows.
    lambda b, h, q, k: (
        apply(
            "add",
            apply("add", scores(), read(0, at(*h), at(q[0]), at(k[0])), dtype=F32),
            read(1, at(h[1]), at(q[1], k[1])),
            dtype=F32,
        ),
        compare(
            "le",
            apply("abs", apply("sub", index(q[0]), index(k[0]))),
            number(3),
        ),
    ),
    lambda s, b, h, q, k, r, c: masked(
        s + r[h, q // 16, k // 16] + c[h % 2, q % 16 * 16 + k % 16], (q // 16 - k // 16).abs() <= 3
    ),
    lambda b, h, q, k, device, dtype: (
        torch.randn(h, q // 16, k // 16, device=device),
        torch.randn(2, 256, device=device),
    ),
    grads=True,
    axes=grid_axes,
)


def sizes_of(query, key):
    return query.shape[0], query.shape[1], query.shape[2], key.shape[2]


def reference(form, query, key, value, *tensors):
    """The attention, dense, in the dtype of its inputs."""
    b, h, q, k = (torch.arange(n, device=query.device) for n in sizes_of(query, key))
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    s = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    s = form.dense(s, b[:, None, None, None], h[:, None, None], q[:, None], k, *tensors)
    return torch.nan_to_num(torch.softmax(s, -1)).to(value.dtype) @ value


class FlexBackend:
    """Replaces the result of a graph, an attention of a form, by FlexAttention; then goes on with another backend."""

    def __init__(self, form, then, *, layers=1, return_lse=False):
        self.form, self.then, self.layers, self.return_lse = form, then, layers, return_lse
        self.modules = []

    def __call__(self, module, inputs):
        self.insert(module)
        self.modules.append(module)
        return self.then(module, inputs)

    def insert(self, module):
        """Replace the first result of a graph."""
        tensors = [n for n in module.graph.find_nodes(op="placeholder") if isinstance(fake_value(n), torch.Tensor)]
        # A region's operands come in the order of their first use, but their names say which argument they are.
        tensors.sort(key=lambda node: (len(node.name), node.name))
        output, shared = module.graph.output_node(), {}
        query = tensors[0]
        for _ in range(self.layers):
            query, lse = insert_flex(module, output, self.spec(query, *tensors[1:]), shared)
        results = output.args[0]
        new = lse if self.return_lse else query
        output.args = ((new, *results[1:]) if isinstance(results, tuple | list) else new,)
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()

    def spec(self, query, key, value, *tensors):
        axes = self.form.axes(sizes_of(fake_value(query), fake_value(key)))
        score, keep = self.form.terms(*axes)
        return FlexSpec(
            query=query,
            key=key,
            value=value,
            scale=1 / math.sqrt(fake_value(query).shape[-1]),
            score=score,
            keep=keep,
            batch=axes[0],
            heads=axes[1],
            query_axes=axes[2],
            key_axes=axes[3],
            leaf=tensors.__getitem__,
            return_lse=self.return_lse,
            training=torch.is_grad_enabled(),
        )


def operands(form, *, b=2, h=4, hk=2, q=256, k=256, d=16, dv=None, dtype=torch.float32, device="cpu", grad=False):
    query = torch.randn(b, h, q, d, dtype=dtype, device=device)
    key = torch.randn(b, hk, k, d, dtype=dtype, device=device)
    value = torch.randn(b, hk, k, dv or d, dtype=dtype, device=device)
    tensors = form.tensors(b=b, h=h, q=q, k=k, device=device, dtype=dtype)
    floats = [t for t in tensors if t.is_floating_point() and form.grads]
    for tensor in (query, key, value, *floats) if grad else ():
        tensor.requires_grad_()
    return query, key, value, *tensors


def exact(arguments):
    """Float64 copies that have gradients of their own."""
    return [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in arguments]
