"""Recognition of attention: a softmax between a product that makes scores and a product that uses the weights.

Everything is read from the output backward: its elements are addressed by axes, and the positions that these take in
the weights, the scores, the queries, keys and values say which axis is what. The spelling leaves no trace.
"""

import math
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp._torch.autograd.attention import hint_of, known_equal, known_shape
from omnicomp.passes.attention.candidates import (
    PASSED,
    PRODUCTS,
    UNREAD,
    Bound,
    added,
    base,
    behind_views,
    closing,
    comes_from_product,
    exponential,
    is_shifted,
    normalized_dim,
    normalized_later,
    product_below,
    reached,
    shift,
    written_out,
)
from omnicomp.passes.attention.form import SWALLOWS
from omnicomp.passes.attention.gates import gate
from omnicomp.passes.attention.operands import peel
from omnicomp.passes.attention.piecewise import additive
from omnicomp.passes.attention.reader import At, Reader, axes_of
from omnicomp.passes.attention.site import (
    FIXED_SIZES,
    NO_MAXIMUM,
    Add,
    Emptied,
    Fill,
    MatchEnded,
    Narrow,
    Scale,
    Site,
    Step,
    axes_in,
    number_in,
    step_of,
    steps_of,
    uncast,
)
from omnicomp.passes.attention.structure import folded, term_key
from omnicomp.passes.attention.terms import Apply, Axis, Number, Position, Read, Scores, Term, flat, leaves
from omnicomp.passes.attention.trace import Op, Trace, Value
from omnicomp.passes.attention.views import VIEWS, NotAView, broadcast, followed, full, source

_CASTS: Final = ("_to_copy", "to")
_IN_CHUNKS: Final = (
    "if keys are cut into chunks that overlap, as for a sliding window, write the product of all queries and keys with "
    "the window as a mask, (i - j).abs() <= w: FlexAttention skips what it hides"
)


def match(softmax: Op, product: Op, trace: Trace, reader: Reader) -> Site:
    """Read the attention around a candidate.

    Raises:
        MatchEnded: at the first thing that is not understood.
    """
    try:
        return _Match(softmax, product, trace, reader).site()
    except NotAView as end:
        raise MatchEnded(
            product.node,
            f"the elements of the attention can't be addressed by axes: {end}",
            needed="plain views",
            lever=_IN_CHUNKS,
        ) from end


class _Match:
    def __init__(self, softmax: Op, product: Op, trace: Trace, reader: Reader) -> None:
        self.softmax, self.used, self.trace, self.reader = softmax, product, trace, reader
        self.late = normalized_later(softmax)
        self.passed: list[Value] = []
        self.dropout = 0.0
        self.repaired = False
        self.weights: list[Step | Emptied] = []
        self.sinks: list[Term] = []
        self.gate = gate(softmax, product, reader) if self.late is None else None
        last = self.late.division if self.late is not None else product if self.gate is None else self.gate.scaling
        self.output = last.node

    def site(self) -> Site:
        at, rows, columns, batch = self._output()
        left, right = self.used.args[:2]
        keys = Axis("k", left.fake.shape[-1])
        key = Position((keys,))
        on_left = self._reaches_softmax(left)
        mine, others = ((rows, columns), (left, right)) if on_left else ((columns, rows), (right, left))
        queries, features = mine
        weights_at = _arrange(self.used, batch, queries, key, transposed=not on_left)
        value_at = _arrange(self.used, batch, key, features, transposed=not on_left)
        value = others[1]
        softmax_at = self._weights(others[0], weights_at)
        if self.gate is not None:
            self._check_rows(self.gate.where, self.gate.total, softmax_at)
            self.passed += self.gate.passed
            self.sinks.append(self.gate.sink)
        if self.late is not None and self.late.total is self.used:
            value, value_at = self._beside_ones(at, (batch, rows, columns), value, value_at)
        else:
            self._check_total(at, softmax_at)
        score, product = self._score(softmax_at, key, queries)
        op, query_first, product_batch, product_queries = self._product(product, key, queries)
        query_value, key_value = op.args[:2] if query_first else op.args[1::-1]
        feature = Position((Axis("d", op.args[0].fake.shape[-1]),))
        query_at = _arrange(op, product_batch, product_queries, feature, transposed=not query_first)
        key_at = _arrange(op, product_batch, feature, key, transposed=not query_first)
        dtype = self.used.outputs[0].fake.dtype
        peeled = [
            peel(value, where, dtype, self.trace, self.reader, self.output, scaled=scaled)
            for value, where, scaled in (
                (query_value, query_at, True),
                (key_value, key_at, True),
                (value, value_at, False),
            )
        ]
        own = [axis for axis in queries.flat() if axis in product_queries.flat()]
        known = (*batch.flat(), *queries.flat())
        others_at = (*product_batch.flat(), *product_queries.flat())
        between = not own and any(axis in queries.flat() for axis in product_batch.flat())
        if between or any(axis in key.flat() for axis in others_at):
            raise self._mixed(op)
        if (queries.flat() and not own) or any(axis not in known for axis in others_at):
            raise self._ended("the queries of the scores are not those of the output", "one product each")
        site = Site(
            softmax=self.softmax,
            output=self.output,
            output_at=at,
            query=peeled[0][0],
            key=peeled[1][0],
            value=peeled[2][0],
            batch=tuple(axis for axis in known if axis not in own),
            queries=tuple(own),
            keys=key.flat(),
            features=feature.flat(),
            value_features=features.flat(),
            scale=peeled[0][1] * peeled[1][1],
            factors=[*peeled[0][2], *peeled[1][2]],
            score=score,
            steps=self._steps(score),
            sinks=self.sinks,
            gated=self.gate is not None,
            dropout=self.dropout,
            weights=self.weights,
            undefined=0.0 if self.repaired else math.nan,
            repaired=self.repaired,
            dtype=dtype,
            product=op.node,
        )
        self._check(site)
        self._drop_repeated(site)
        self._part_heads(site)
        return site

    def _part_heads(self, site: Site) -> None:
        """Heads that share keys and values may be rows beside the queries; a mask of the queries alone is one for each.

        Without one, the rows of all heads together are the queries.
        """
        keys, rows = set(flat(site.keys)), flat(site.queries)
        terms = [term for step in site.steps or () for term in vars(step).values() if isinstance(term, Term)]
        masked = {axis for term in terms if axes_in(term) & keys for axis in axes_in(term)}
        own, heads = (tuple(axis for axis in rows if (axis in masked) is each) for each in (True, False))
        if own and heads and _count(own) >= _count(heads):  # a bias for each head and key is no mask
            site.batch, site.queries = (*site.batch, *heads), own

    def _drop_repeated(self, site: Site) -> None:
        """Weights that are set to zero where the scores were filled are zero there; so are rows without a key."""
        steps: list[Any] = list(site.steps or [])
        if steps and self._subtracts_greatest(steps[-1], site):
            steps.pop()
        *others, fill = steps or [None]
        if not all(isinstance(step, Scale | Add) for step in others):
            return
        # What is added may hide keys as well, and leave NaN in rows where the fill hides the others.
        added = any(isinstance(step, Add) for step in others)
        value = number_in(fill.value) if isinstance(fill, Fill) else None
        most = -math.inf if added else SWALLOWS
        if not isinstance(fill, Fill) or not isinstance(value, int | float) or value > most:
            return
        axes = {"batch": flat(site.batch), "heads": (), "query": flat(site.queries), "key": flat(site.keys)}

        def key_of(condition: Term) -> Any:
            return term_key(self.reader.expand(condition), **axes)

        for place, step in enumerate(site.weights):
            if (
                isinstance(step, Fill)
                and number_in(step.value) == 0
                and key_of(step.condition) == key_of(fill.condition)
            ):
                if added:
                    site.weights[place] = Emptied(fill.condition)
                    return
                del site.weights[place]
                site.undefined = 0.0
                assert site.steps is not None
                site.steps[len(others)] = Fill(fill.condition, Number(dtype=fill.value.dtype, value=-math.inf))
                return

    def _subtracts_greatest(self, step: Any, site: Site) -> bool:
        """Whether a step is what a softmax that is written out does by itself, as torch's does."""
        if exponential(self.softmax) is None or not isinstance(step, Add) or axes_in(step.term) & set(flat(site.keys)):
            return False
        return is_shifted(self.softmax)

    def _ended(self, sentence: str, needed: str, op: Op | None = None, observed: str = "", **more: str) -> MatchEnded:
        op = op or self.softmax
        return MatchEnded(op.node, sentence, needed=needed, observed=observed or f"aten.{op.name}", **more)

    def _mixed(self, op: Op | None) -> MatchEnded:
        return self._ended(
            "the scores are mixed between heads by another product before the softmax, which no fused kernel does",
            "scores that go to the softmax head by head",
            op,
            lever="leave the mixing of heads out, or mix the outputs of the heads instead",
        )

    def _output(self) -> tuple[At, Position, Position, Position]:
        """Axes for the output's dimensions, and where they are in the product: rows, columns and batch."""
        value = self.trace.values.get(self.output)
        if value is None:
            raise self._ended("the attention's output is not a tensor of its own", "one tensor", self.used)
        at = where = axes_of(value, "x") if self.gate is None else self.gate.at
        if self.gate is not None and value.op is self.gate.scaling:
            self.passed.append(value)
            value = self.gate.above
        if self.late is not None and value.op is self.late.division:
            self.passed.append(value)
            value = self.late.above
            if not known_shape(value.fake, self.late.division.outputs[0].fake):
                raise self._ended("the sums of the weights have dimensions of their own", "a sum for each query")
        while value.op is not self.used:
            if value.op is None or value.op.name not in VIEWS:
                raise self._ended(
                    "the operation that multiplies weights and values does more than that", "a product", value.op
                )
            value, where = source(value.op, value.index, where)
        self.passed.append(value)
        batch, rows, columns = where if len(where) == 3 else (Position(), *where)
        return at, rows, columns, batch

    def _check_total(self, at: At, softmax_at: At) -> None:
        """Where the product is divided by the sums of the weights: that each query is divided by its own."""
        if self.late is None:
            return
        self._check_rows(self._divisor(at, self.late.total), self.late.total, softmax_at)

    def _check_rows(self, where: At, total: Op, softmax_at: At) -> None:
        dim = normalized_dim(self.softmax) % len(softmax_at)
        if total.argument("keepdim", False):
            where = (*where[:dim], *where[dim + 1 :])
        rows = (*softmax_at[:dim], *softmax_at[dim + 1 :])
        sizes = (*self.softmax.outputs[0].fake.shape[:dim], *self.softmax.outputs[0].fake.shape[dim + 1 :])
        for mine, its, size in zip(rows, where, sizes, strict=True):
            if not known_equal(size, 1) and (flat(mine.axes), mine.start) != (flat(its.axes), its.start):
                raise self._ended("a query is divided by the sum of the weights of another one", "its own sum")

    def _divisor(self, at: At, made_by: Op) -> At:
        """Where in the result of an operator the numbers are that the elements of the output are divided by."""
        assert self.late is not None
        value = self.late.divisor
        passed, where = followed(value, broadcast(value, at), made_by)
        self.passed += passed
        return where

    def _beside_ones(self, at: At, place: At, values: Value, values_at: At) -> tuple[Value, At]:
        """The values, where a column of ones beside them makes the sums that the product is divided by.

        Args:
            at: the output.
            place: the output in the product: its batch, rows and columns.
            values: the second operand of the product.
            values_at: the part of it that makes the output.
        """
        *rows, column = where = self._divisor(at, self.used)
        same = all(
            (flat(one.axes), one.start) == (flat(other.axes), other.start)
            for one, other in zip(rows, place[-len(where) : -1], strict=True)
        )
        made = Read(dtype=values.fake.dtype, value=values, at=(*values_at[:-1], column))
        if column.axes or not same or number_in(self.reader.expand(made)) != 1:
            raise self._ended(
                "a query is divided by what is not known to be the sum of its weights",
                "its own sum, made by a column of ones beside the values",
                lever="write torch.softmax(scores, -1) @ v",
            )
        term = self.reader.define(Read(dtype=values.fake.dtype, value=values, at=values_at))
        inner = uncast(term) if term is not None else None
        return (inner.value, inner.at) if isinstance(inner, Read) else (values, values_at)

    def _reaches_softmax(self, value: Value) -> bool:
        seen, stack = {value}, [value]
        while stack and len(seen) < 200:
            op = stack.pop().op
            if op is self.softmax:
                return True
            if op is not None and op.name in PASSED:
                new = [v for v in op.inputs if v not in seen]
                seen.update(new)
                stack.extend(new)
        return False

    def _weights(self, value: Value, at: At) -> At:
        """Follow the weights from the product with the values back to the softmax."""
        while value.op is not self.softmax:
            self.passed.append(value)
            op = value.op
            if op is None:
                raise self._ended("the attention weights are changed through other memory", "no change in place")
            if op.name in VIEWS:
                value, at = source(op, value.index, at)
            elif op.name == "nan_to_num" and not op.argument("nan"):
                # No weight is infinite; those of rows without keys are NaN, and of rows with a score that is none.
                value, self.repaired = op.args[0], True
            elif op.name == "dropout":
                self.dropout = self._drop(op)
                value = op.args[0]
            elif op.name in _CASTS and op.args[0].fake.device == value.fake.device:
                value = op.args[0]
            else:
                value, at = self._weighted(op, at)
        self.passed.append(value)
        return at

    def _drop(self, op: Op) -> float:
        probability = float(op.args[1])
        if self.dropout or math.isnan(probability):
            raise self._ended("the dropout's probability is not a known number", "one dropout, 0 < p < 1", op)
        return probability

    def _weighted(self, op: Op, at: At) -> tuple[Value, At]:
        """A factor or a mask on the weights after the softmax."""
        read = Read(dtype=op.outputs[0].fake.dtype, value=op.outputs[0], at=at)
        term = self.reader.define(read)
        while isinstance(term, Apply) and term.op == "cast":
            term = term.args[0]
        if isinstance(term, Read):
            return term.value, term.at
        if isinstance(term, Apply):
            carriers = [n for n, a in enumerate(term.args) if isinstance(uncast(a), Read) and self._carries(a)]
            if len(carriers) == 1:
                carrier: Any = uncast(term.args[carriers[0]])
                step = self._with_number(step_of(term, carriers[0]))
                if isinstance(step, Scale) or (isinstance(step, Fill) and number_in(step.value) == 0):
                    self.weights.insert(0, step)
                    return carrier.value, carrier.at
        raise self._changed_weights(op)

    def _steps(self, score: Term) -> list[Step | Narrow] | None:
        steps = steps_of(score)
        return None if steps is None else [self._with_number(step) for step in steps]

    def _with_number(self, step: Any) -> Any:
        """A step with the number that it fills in, if a tensor of one number is filled in; others as they are."""
        if not isinstance(step, Fill) or number_in(step.value) is not None:
            return step
        value = folded(self.reader.expand(step.value))
        return Fill(step.condition, value) if isinstance(value, Number) else step

    def _changed_weights(self, op: Op) -> MatchEnded:
        """What an operator does to the weights that no kernel does, and what to write instead."""
        operands = [value for value in op.args if isinstance(value, Value)]
        total = _sum(operands[1]) if op.name == "div" and len(operands) == 2 else None
        if total is not None:
            rank, dims = self.softmax.outputs[0].fake.dim(), total.argument("dim", None)
            if total.args[0].fake.dim() == rank and normalized_dim(self.softmax) % rank not in _dims(dims, rank):
                return self._not_over_keys()
            lever = "hide keys before the softmax, scores.masked_fill(~mask, float('-inf')), and leave the division out"
            mixed = behind_views(operands[0]).op
            if mixed is not None and mixed.name in ("add", "sub", "lerp"):
                lever = "mix the outputs, (1 - g) * (softmax(a) @ v) + g * (softmax(b) @ v), whose weights sum to one"
            return self._ended(
                "the attention weights are divided by their sums once more before they meet the values",
                "a softmax over what is not hidden, whose sums are one",
                op,
                lever=lever,
            )
        if op.name in ("add", "sub", "lerp") and len(operands) > 1:
            return self._ended(
                f"the attention weights are {'added to' if op.name == 'add' else 'combined with'} others before they "
                "meet the values",
                "one attention for each product with values",
                op,
                lever="multiply each with the values first, and combine the outputs: "
                "softmax(a) @ v - factor * (softmax(b) @ v)",
            )
        if op.name == "overwritten":
            return self._ended(
                "a part of the weights is written to, otherwise than by zero at fixed places",
                "weights that go to the values as they are",
                op,
                lever="hide keys before the softmax, scores.masked_fill(~mask, float('-inf'))",
            )
        if op.name in ("cat", "stack"):
            return self._ended(
                "the weights of several softmaxes are joined before they meet the values",
                "one product with values for each",
                op,
                lever="multiply each with its own values, and join the outputs: torch.cat([w @ v for w, v in ...])",
            )
        return self._ended(
            "the attention weights are changed before they meet the values",
            "dropout, casts, or a factor",
            op,
            lever="change the scores before the softmax instead, or the output behind the product with the values",
        )

    def _not_over_keys(self) -> MatchEnded:
        return self._ended(
            "the softmax is not over the keys",
            "the dimension that the values are summed over",
            lever="normalize along the dimension that the values are summed over: softmax(scores, -1) @ v",
        )

    def _carries(self, term: Term) -> bool:
        inner = uncast(term)
        return isinstance(inner, Read) and self._reaches_softmax(inner.value)

    def _score(self, at: At, key: Position, queries: Position) -> tuple[Term, Read]:
        """What is normalized, as a term over the product of queries and keys; and that product."""
        exponent = exponential(self.softmax)
        value = next(self.softmax.inputs) if exponent is None else exponent
        dim = normalized_dim(self.softmax) % len(at)
        size = value.fake.shape[dim]
        if (own := flat(at[dim].axes)) != flat(key.axes):
            # A product that sums over heads as well mixes these, too.
            if set(own) < set(flat(key.axes)) or product_below(self.used.outputs[0], PASSED | UNREAD.keys()):
                raise self._ended(
                    "the weights are mixed between heads by another product before they meet the values",
                    "weights that go to the values as they are",
                    self.used,
                    lever="leave the mixing of heads out, or mix the outputs of the heads instead",
                )
            raise self._not_over_keys()
        closed = None if (mask := closing(self.softmax)) is None else self._closed(mask, at, key, queries)
        if (more := added(self.softmax)) is not None and self._adds(*more, masked=closed is not None):
            value = self._beside(more[1], value, at, dim)
        if not full(at[dim], size):
            value, at = self._sink(value, at, dim, size)
        depends: dict[Value, bool] = {}
        read = self.reader.read(value, at)
        term = self.reader.expand(read, lambda r: not _is_product(r.value) and _depends(r.value, None, depends))
        found = {id(leaf.value): leaf for leaf in leaves(term) if isinstance(leaf, Read) and _is_product(leaf.value)}
        # A bias may be a product, too; the scores are the product whose rows are the queries.
        fitting = [leaf for leaf in found.values() if any(flat(p.axes) == flat(key.axes) for p in leaf.at[-2:])]
        fitting.sort(key=lambda leaf: -len({a for p in leaf.at[-2:] for a in p.flat()} & set(queries.flat())))
        if not fitting and any(axis in key.flat() for leaf in found.values() for p in leaf.at for axis in p.flat()):
            raise self._mixed(next(iter(found.values())).value.op)
        if not fitting:
            stopped = [leaf for leaf in leaves(term) if isinstance(leaf, Read) and leaf.value.op is not None]
            where = next((leaf.value.op for leaf in stopped if comes_from_product(leaf.value)), None)
            lever = ""
            if where is not None and where.name in (*VIEWS, "constant_pad_nd"):
                known = all(isinstance(size, int) for size in where.outputs[0].fake.shape)
                lever = _IN_CHUNKS if known else FIXED_SIZES
            if where is not None and where.name in ("cat", "stack"):
                raise self._ended(
                    "the scores of several products are joined before the softmax",
                    "the scores of one product",
                    where,
                    lever="join the queries, torch.cat([a, b], -2) @ k.transpose(-2, -1), or end each product with a "
                    "softmax and values of its own",
                )
            if where is not None and where.name == "overwritten":
                raise self._ended(
                    "a part of the scores is written to, otherwise than by a number or a sum at fixed places",
                    "one expression for all scores",
                    where,
                    lever="write it for all of them: scores = scores * torch.where(part, factor, 1.0)",
                )
            raise self._ended(
                "the scores are no product of queries and keys through arithmetic and views",
                "scale, mask, bias and other arithmetic of elements",
                where,
                observed="" if where is None else f"aten.{where.name} in {where.node.name}",
                lever=lever,
            )
        product, depends = fitting[0], {}
        self.passed.append(value)
        term = self.reader.expand(read, lambda r: self._wanted(r.value, product.value, depends))
        term = _replaced(term, product)
        if (number := base(self.softmax)) != math.e:
            if self.sinks:
                raise self._ended("a sink takes part in exponentials to another base than e", "torch.exp")
            term = Apply(dtype=term.dtype, op="mul", args=(term, Number(dtype=term.dtype, value=math.log(number))))
        if closed is not None:
            term = Apply(dtype=term.dtype, op="where", args=(closed, Number(dtype=term.dtype, value=-math.inf), term))
        return term, product

    def _closed(self, op: Op, at: At, key: Position, queries: Position) -> Term:
        """Where exponentials are set to zero before they are summed, as if their scores were -inf."""
        made = self.reader.define(Read(dtype=op.outputs[0].fake.dtype, value=op.outputs[0], at=at))
        scores = exponential(self.softmax)
        arguments = made.args if isinstance(made, Apply) else ()
        carriers = [n for n, each in enumerate(arguments) if _reads_what_is_made_of(each, scores)]
        step = self._with_number(step_of(made, carriers[0])) if isinstance(made, Apply) and len(carriers) == 1 else None
        if isinstance(step, Fill) and number_in(step.value) == 0:
            return step.condition
        if isinstance(step, Scale):
            others = tuple(axis for p in at for axis in p.flat() if axis not in (*key.flat(), *queries.flat()))
            axes = {"batch": others, "heads": (), "query": queries.flat(), "key": key.flat()}
            pieces = additive(self.reader.expand(step.term), **axes)
            if pieces is not None and set(pieces.values) <= {0.0, 1.0}:
                return pieces.keep()
        raise self._ended(
            "the exponentials are multiplied by what is not known to be a mask of ones and zeros",
            "a mask that is made of conditions in the program",
            op,
            lever="hide keys before a softmax: torch.softmax(scores.masked_fill(~mask, float('-inf')), -1)",
        )

    def _adds(self, total: Op, more: Any, *, masked: bool) -> bool:
        """Whether what is added to the sums of the exponentials changes them.

        Where the greatest score is subtracted a sum is at least one, unless exponentials are set to zero afterwards.
        """
        if masked or not is_shifted(self.softmax):
            return True
        if isinstance(more, Bound):
            return not (isinstance(more.least, int | float) and more.least <= 1)
        number, division = self._number(more), self.softmax if self.late is None else self.late.division
        finest = torch.promote_types(*(op.outputs[0].fake.dtype for op in (total, division)))
        return number is None or not 0 <= number < torch.finfo(finest).eps / 2

    def _number(self, made: Any) -> float | None:
        """The number that an operand is, for all elements and in each call."""
        if isinstance(made, Value):
            made = number_in(folded(self.reader.expand(self.reader.read(made, axes_of(made)))))
        return float(made) if isinstance(made, int | float) else None

    def _beside(self, more: Any, value: Value, at: At, dim: int) -> Value:
        """What is added to the sums of the exponentials, as a sink; and the scores beside which it stands.

        `exp(x - m) / (exp(x - m).sum() + n * exp(-m))` has a sink of log(n) beside x, whatever m is.
        """
        factor = 1.0
        shifted = shift(self.softmax)
        if shifted is not None and isinstance(more, Value):
            made = behind_views(more).op
            if made is not None and made.name == "mul" and (number := self._number(made.args[1])) is not None:
                factor, made = number, behind_views(made.args[0]).op
            inverse = behind_views(made.args[0]).op if made is not None and made.name == "exp" else None
            same = inverse is not None and inverse.name == "neg" and behind_views(inverse.args[0]) is shifted[1]
            if same and known_equal(shifted[1].fake.shape[dim], 1):
                self.passed.append(value)
                return self._with_sink(factor, shifted[0])
        elif shifted is None and (number := self._number(more)) is not None:
            return self._with_sink(number, value)
        raise self._not_beside()

    def _not_beside(self) -> MatchEnded:
        return self._ended(
            "the sums of the exponentials are bounded, or what is added to them is no positive number, or is not "
            "shifted as the scores are",
            "exp(x) / (n + exp(x).sum()), or n * exp(-m) where m is subtracted from x",
            lever="leave out what is added, or write a column beside the scores: torch.softmax(torch.cat([scores, "
            "zeros], -1), -1)[..., :-1] @ v",
        )

    def _with_sink(self, number: float, scores: Value) -> Value:
        if not 0 < number < math.inf:
            raise self._not_beside()
        self.sinks.append(Apply(dtype=torch.float32, op="log", args=(Number(dtype=torch.float32, value=number),)))
        return scores

    def _wanted(self, value: Value, product: Value, depends: dict[Value, bool]) -> bool:
        """Whether to look into a value: it comes from the product, or may be a number."""
        if not _depends(value, product, depends):
            return value.fake.dim() == 0 and number_in(self.reader.expand(self.reader.read(value, ()))) is not None
        if value is not product:
            self.passed.append(value)
        return value is not product

    def _sink(self, value: Value, at: At, dim: int, size: Any) -> tuple[Value, At]:
        """Columns that take part in the softmax and are cut off after it."""
        shift = value.op
        # `x - x.max(-1, keepdim=True)` on the way changes no weight.
        while shift is not None and shift.name in ("sub", "clone", *_CASTS):
            if shift.name == "sub" and not known_equal(shift.args[1].fake.shape[dim], 1):
                break
            self.passed.append(value)
            value = shift.args[0]
            shift = value.op
        if value.op is not None and value.op.name == "constant_pad_nd":
            return self._padded(value, at, dim)
        if value.op is None or value.op.name != "cat" or int(value.op.argument("dim", 0)) % len(at) != dim:
            raise self._parted("the softmax is over more columns than there are keys", "columns joined by cat")
        self.passed.append(value)
        chosen: list[Value] = []
        start: Any = 0
        for piece in value.op.args[0]:
            width = piece.fake.shape[dim]
            if known_equal(start, at[dim].start) and full(Position(at[dim].axes), width):
                chosen.append(piece)
            elif known_equal(width, 1):
                self.sinks.append(self.reader.read(piece, (*at[:dim], Position(), *at[dim + 1 :])))
            else:
                raise self._parted(
                    "several columns without values take part in the softmax", "one column each", value.op
                )
            start = start + width
        if len(chosen) != 1 or not known_equal(start, size):
            raise self._ended("the columns of the softmax are not the keys and sinks", "keys and sinks", value.op)
        return chosen[0], (*at[:dim], Position(at[dim].axes), *at[dim + 1 :])

    def _padded(self, value: Value, at: At, dim: int) -> tuple[Value, At]:
        """One column of a number beside the scores."""
        op = value.op
        assert op is not None
        scores, sizes, number = op.args[0], op.argument("pad"), op.argument("value", 0)
        left, right = (*sizes, 0, 0)[:2] if dim == len(at) - 1 else (0, 0)
        alone = not any(sizes[2:]) and (left, right) in ((0, 1), (1, 0)) and isinstance(number, int | float)
        if not alone or not known_equal(at[dim].start, left):
            raise self._parted("the softmax is over more columns than there are keys", "one column of a number", op)
        self.passed.append(value)
        self.sinks.append(Number(dtype=value.fake.dtype, value=float(number)))
        return scores, (*at[:dim], Position(at[dim].axes), *at[dim + 1 :])

    def _parted(self, sentence: str, needed: str, op: Op | None = None) -> MatchEnded:
        """What to say of columns that are neither keys nor sinks: parts of the weights may meet values of their own."""
        through = (*VIEWS, *_CASTS, "clone", "dropout")
        if len(reached(self.softmax.outputs[0], PRODUCTS, through)) < 2:
            return self._ended(sentence, needed, op)
        return self._ended(
            "the weights are cut into parts that meet values of their own",
            "one product of all weights",
            op,
            lever="join keys and values: softmax(q @ torch.cat([k, k2], -2).mT) @ torch.cat([v, v2], -2)",
        )

    def _product(self, read: Read, key: Position, queries: Position) -> tuple[Op, bool, Position, Position]:
        """The product of queries and keys: whether queries are its left operand, its batch axes and query axes."""
        op = read.value.op
        assert op is not None
        batch = read.at[0] if len(read.at) == 3 else Position()
        rows, columns = read.at[-2:]
        query_first = flat(columns.axes) == flat(key.axes)
        own = rows if query_first else columns
        for position in (batch, own):
            if not known_equal(position.start, 0):
                raise self._ended("the scores are a part of a larger product", "the whole product", op)
        if not own.axes and queries.axes:
            raise self._ended("the scores are the same for every query", "a query axis", op)
        return op, query_first, batch, own

    def _check(self, site: Site) -> None:
        sizes = [(o.value.fake.shape, o.at) for o in (site.query, site.key, site.value)]
        for shape, at in sizes:
            used = [axis for position in at for axis in position.flat()]
            if len(set(used)) != len(used) or len(shape) != len(at):
                raise self._ended("an axis addresses two dimensions of an operand", "one dimension for each axis")
        if any(axis in site.keys for axis in (*site.batch, *site.queries)):
            raise self._ended("keys and queries share an axis", "two axes")
        if not site.dtype.is_floating_point:
            raise self._ended("the attention is not of real numbers", "floating point", observed=str(site.dtype))
        site.chain = self._chain(site)
        for position in site.output_at:
            if not all(axis in (*site.batch, *site.queries, *site.value_features) for axis in position.flat()):
                raise self._ended("the output has an axis of its own", "batch, queries and features")

        self._check_gradients(site)
        self._check_masks(site)

    def _check_masks(self, site: Site) -> None:
        """A mask that is made of the scores needs them beside the fused kernel, which would make them once more."""
        keys = set(flat(site.keys))
        terms = [term for step in site.steps or () for term in vars(step).values() if isinstance(term, Term)]
        # What is the same for all keys, such as the greatest score, no softmax sees.
        reads = [leaf for term in terms for leaf in leaves(term) if isinstance(leaf, Read) and axes_in(leaf) & keys]
        if _made_of_scores(reads, site, self.trace) is not None:
            raise self._ended(
                "the mask depends on the scores, so that a fused kernel would be one product more",
                "a mask of what is known before the product",
                lever="hide keys by a mask that does not depend on the scores",
            )

    def _check_gradients(self, site: Site) -> None:
        """Gradients that a program stops on the way from the output to the scores would flow through a fused kernel."""
        if not _requires_grad(site.output):
            return
        for node in sorted(site.chain):
            value = node.meta.get("example_value")
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.requires_grad:
                continue
            if any(map(_requires_grad, node.all_input_nodes)):
                raise MatchEnded(
                    node,
                    f"{node.name} passes no gradients on, but the fused kernel would",
                    observed="detach, or no_grad, inside the attention",
                    needed="gradients through the whole attention, or through nothing of it",
                    lever="detach queries, keys or values instead, or run the whole attention without grad",
                    code="not_equal",
                )

    def _chain(self, site: Site) -> set[Node]:
        nodes = {value.op.node for value in self.passed if value.op is not None} | {site.product}
        nodes |= {op.node for op in written_out(self.softmax)}
        # A cast to the dtype that a tensor has is a node that holds the same tensor.
        own = site.output.graph
        held = [value for value in self.passed if value.op is not None and value.op.node in nodes]
        nodes |= {holder for value in held for holder in value.holders if holder.graph is own}
        elsewhere = next((n for n in nodes if n.graph is not site.output.graph), None)
        if elsewhere is not None:
            raise self._ended("the attention is spread over two regions of the graph", "one region")
        return nodes


def check_score(site: Site, trace: Trace) -> None:
    """That nothing that is made of all scores of a row, or of all rows, changes a score, save by a shift at the end.

    Raises:
        MatchEnded: a fused kernel would make the scores once more.
    """
    steps = site.steps or []
    # A softmax does not see a shift, but what follows it may.
    last = max((n for n, step in enumerate(steps) if not isinstance(step, Add | Fill | Scale)), default=0)
    terms = [step.term for step in steps[:last] if isinstance(step, Add)] if steps else [site.score]
    reads = [leaf for term in terms for leaf in leaves(term) if isinstance(leaf, Read)]
    passed = _made_of_scores(reads, site, trace)
    if passed is not None:
        greatest = any(op.name in ("max", "amax") for op in passed)
        raise MatchEnded(
            site.softmax.node,
            f"{'a maximum' if greatest else 'a sum'} of the scores changes them, which is one product more beside a "
            "fused kernel",
            needed="scores of which each is made of itself",
            lever=NO_MAXIMUM if greatest else "",
        )


def _made_of_scores(reads: list[Read], site: Site, trace: Trace) -> set[Op] | None:
    """The operators by which one of some tensors is made of the scores, and others; None if none is."""
    first, seen = trace.order[site.product], set[Op]()
    stack = [read.value.op for read in reads]
    while stack:
        op = stack.pop()
        if op is None or op in seen or trace.order[op.node] < first:
            continue
        if op.node is site.product:
            return seen
        seen.add(op)
        stack.extend(value.op for value in op.inputs)
    return None


def _requires_grad(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _count(axes: tuple[Axis, ...]) -> int:
    """How many elements there were along some axes at compile time; 0 if that depends on data."""
    try:
        return math.prod(hint_of(axis.size) for axis in axes)
    except ValueError:  # of `hint_of`
        return 0


def _arrange(op: Op, batch: Position, rows: Position, columns: Position, *, transposed: bool) -> At:
    pair = (columns, rows) if transposed else (rows, columns)
    return pair if op.name == "mm" else (batch, *pair)


def _reads_what_is_made_of(term: Term, value: Value | None) -> bool:
    inner = uncast(term)
    return isinstance(inner, Read) and inner.value.op is not None and value in inner.value.op.inputs


def _is_product(value: Value) -> bool:
    return value.op is not None and value.op.name in PRODUCTS


def _sum(value: Value) -> Op | None:
    """The sum that a value is, maybe with a number added or behind a bound."""
    for _ in range(8):
        op = value.op
        if op is None or op.name == "sum":
            return op
        if op.name not in (*VIEWS, *_CASTS, "clone", "add", "clamp", "clamp_min", "maximum"):
            return None
        value = next(op.inputs)
    return None


def _dims(given: Any, rank: int) -> set[int]:
    """The dimensions that a sum is over, from its argument."""
    return {dim % rank for dim in given} if isinstance(given, list | tuple) and given else set(range(rank))


def _depends(value: Value, product: Value | None, memo: dict[Value, bool]) -> bool:
    """Whether a value comes from that product, or from any, through what the reader can define."""
    if value not in memo:
        memo[value] = False
        op = value.op
        if op is not None and op.name in PRODUCTS:
            memo[value] = product is None or value is product
        elif op is not None and op.name in PASSED and op.name not in ("amax", "max", "sum", "gather", "index"):
            memo[value] = any(_depends(v, product, memo) for v in op.inputs)
    return memo[value]


def _replaced(term: Term, product: Read) -> Term:
    """`term` with the product of queries and keys as `Scores`."""
    made = Scores(dtype=product.dtype)

    def visit(item: Term) -> Term:
        if isinstance(item, Read) and item.value is product.value and item.at == product.at:
            return made
        if isinstance(item, Apply):
            return Apply(dtype=item.dtype, op=item.op, args=tuple(map(visit, item.args)))
        return item

    return visit(term)
