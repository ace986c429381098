"""A sink that is written as a gate on the output, `(weights @ v) * sigmoid(logsumexp(scores) - sink)`."""

from typing import Final

from omnicomp import records
from omnicomp._torch.autograd.attention import known_shape
from omnicomp.passes.attention.candidates import behind_views, exponential, reached
from omnicomp.passes.attention.reader import At, Reader, axes_of
from omnicomp.passes.attention.site import uncast
from omnicomp.passes.attention.terms import Apply, Read, Term
from omnicomp.passes.attention.trace import Op, Value
from omnicomp.passes.attention.views import VIEWS, broadcast

_MOVED: Final = (*VIEWS, "_to_copy", "clone")
_ON_THE_WAY: Final = (*_MOVED, "add", "sub", "neg", "sigmoid")


@records.dataclass(frozen=True, kw_only=True)
class Gate:
    """What scales the output of an attention by the share that its keys have of all weight, the sink's included.

    Attributes:
        scaling: the operator that does, and makes the output.
        at: a position along each dimension of the output.
        above: what is scaled.
        sink: the sink, addressed by the same axes.
        total: the log-sum-exp of the scores.
        where: which of its elements scales an element of the output.
        passed: the values from it to the share.
    """

    scaling: Op
    at: At
    above: Value
    sink: Term
    total: Op
    where: At
    passed: list[Value]


def gate(softmax: Op, product: Op, reader: Reader) -> Gate | None:
    """The gate that is a sink, behind a softmax and its product with the values; None if there is none."""
    exponent = exponential(softmax)
    scores = behind_views(next(softmax.inputs) if exponent is None else exponent)
    for total in reached(scores, ("logsumexp",), ("_to_copy", "clone")):
        for scaling in reached(total.outputs[0], ("mul",), _ON_THE_WAY):
            for above, share in (scaling.args, scaling.args[::-1]):
                if not isinstance(above, Value) or not isinstance(share, Value):
                    continue
                if behind_views(above, _MOVED) is product.outputs[0]:
                    return _read(scaling, above, share, total, reader)
    return None


def _read(scaling: Op, above: Value, share: Value, total: Op, reader: Reader) -> Gate | None:
    fake, lse = scaling.outputs[0].fake, total.outputs[0]
    if not known_shape(above.fake, fake) or above.fake.dtype != fake.dtype:
        return None
    at, below = axes_of(scaling.outputs[0]), [lse]
    for value in below:
        below += [v for op in value.users if op.name in _ON_THE_WAY for v in op.outputs if v not in below]
    passed = [lse]

    def on_the_way(read: Read) -> bool:
        wanted = read.value in below and read.value is not lse
        if wanted:
            passed.append(read.value)
        return wanted

    term = uncast(reader.expand(reader.read(share, broadcast(share, at)), on_the_way))
    if not isinstance(term, Apply) or term.op != "sigmoid":
        return None
    term, sign = uncast(term.args[0]), 1
    if isinstance(term, Apply) and term.op == "neg":
        term, sign = uncast(term.args[0]), -1
    if not isinstance(term, Apply) or term.op not in ("add", "sub"):
        return None
    signs = (sign, sign if term.op == "add" else -sign)
    for place, part in enumerate(map(uncast, term.args)):
        if isinstance(part, Read) and part.value is lse and signs[place] > 0:
            sink = term.args[1 - place]
            if signs[1 - place] > 0:
                sink = Apply(dtype=sink.dtype, op="neg", args=(sink,))
            return Gate(scaling=scaling, at=at, above=above, sink=sink, total=total, where=part.at, passed=passed)
    return None
