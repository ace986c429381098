"""Traced graphs for tests: what Dynamo captures, its trace and its sites, and terms evaluated element by element."""

import operator

import torch

from omnicomp.passes.attention.candidates import candidates
from omnicomp.passes.attention.match import match
from omnicomp.passes.attention.reader import Reader, axes_of
from omnicomp.passes.attention.terms import Apply, Index, Number, Read, flat
from omnicomp.passes.attention.trace import trace

OPERATIONS = {
    **{n: getattr(torch, n) for n in "add sub mul div pow maximum minimum eq ne lt le gt ge neg abs exp log".split()},
    **{n: getattr(torch, n) for n in "tanh sigmoid sqrt rsqrt relu where floor reciprocal".split()},
    **{n: getattr(torch, f"logical_{n}") for n in ("and", "or", "xor", "not")},
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
}


class Capture:
    """A backend that keeps the graph, its inputs' values and its trace, and runs the graph as it is."""

    def __call__(self, module, inputs):
        self.module, self.inputs, self.trace = module, inputs, trace(module)
        return module.forward

    def node(self, name):
        """The node with that name."""
        return next(n for n in self.module.graph.nodes if n.name == name)

    def output(self, index=0):
        """The value that the function returns."""
        (output,) = self.module.graph.find_nodes(op="output")
        return self.trace.values[output.args[0][index]]

    def tensors(self):
        """The real tensors of the inputs, by value."""
        names = self.module.graph.find_nodes(op="placeholder")
        pairs = zip(names, self.inputs, strict=True)
        return {self.trace.values[n]: x for n, x in pairs if isinstance(x, torch.Tensor)}

    def names(self):
        """The names of the operators, in order."""
        return [op.name for op in self.trace.ops]


def capture(function, *arguments, **options):
    """Compile `function`, run it, and return what was captured."""
    torch._dynamo.reset()
    backend = Capture()
    torch.compile(function, backend=backend, fullgraph=True, **options)(*arguments)
    return backend


def site_of(function, *arguments, **options):
    """The attention in `function`, read; with the capture and the reader."""
    backend, reader = capture(function, *arguments, **options), Reader()
    softmax, product = next(candidates(backend.trace, backend.module.graph))
    return match(softmax, product, backend.trace, reader), backend, reader


def read(function, *arguments):
    """The term of the result of `function`, its axes, and the tensors of the inputs by value."""
    backend, reader = capture(function, *arguments), Reader()
    value = backend.output()
    at = axes_of(value)
    return reader.expand(reader.read(value, at)), at, backend.tensors()


def evaluate(term, at, tensors):
    """The tensor of a term whose dimensions are addressed by `at`; float results in the term's dtypes."""
    axes = flat(axis for position in at for axis in position.axes)

    def number_along(position):
        place = torch.zeros([1] * len(axes), dtype=torch.int64)
        for axis in flat(position.axes):
            place = place * axis.size
            place = place + torch.arange(axis.size).view([-1 if a is axis else 1 for a in axes])
        return place + position.start

    def visit(item):
        if isinstance(item, Number):
            return torch.full([1] * len(axes), item.value, dtype=item.dtype)
        if isinstance(item, Index):
            return (item.start + item.step * number_along(item.position)).to(item.dtype)
        if isinstance(item, Read):
            return tensors[item.value][tuple(map(number_along, item.at))]
        assert isinstance(item, Apply)
        args = [visit(argument) for argument in item.args]
        return args[0].to(item.dtype) if item.op == "cast" else OPERATIONS[item.op](*args).to(item.dtype)

    shape = [operator.index(axis.size) for axis in axes]
    result = visit(term).expand(shape)
    return result.reshape([_count(position) for position in at])


def _count(position):
    count = 1
    for axis in flat(position.axes):
        count *= axis.size
    return count
