"""The checker: two graphs go in, a certificate comes out. It knows nothing of whoever made the second of the first."""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from omnicomp._torch.autograd.run_in_precision import InPrecision, on_real_tensors
from omnicomp._torch.fx import fake_value
from omnicomp.analysis.accuracy import relative_error
from omnicomp.analysis.certify import certificate as c
from omnicomp.analysis.certify import effects, fields, inputs, interpret, predicates, sizes, structure, values
from omnicomp.analysis.certify.values import State, Unsupported

_GOAL: Final = -40.0
# Elements of all results of both graphs, up to which they run over fields, and on numbers to confirm a difference.
_ELEMENTS: Final = 400_000
_CONFIRMED: Final = 40_000_000
# Up to which sizes that are numbers stay as they are, once.
_FEW: Final = 2**15
_LEAST: Final = (sizes.STRUCTURE, sizes.STRUCTURE + 1)
# Tried behind these: up to which number sizes stay, and the smallest new one, low where products would be too large.
_FURTHER: Final = ((sizes.STRUCTURE, 7), (3, 4), (sizes.STRUCTURE, 3), (sizes.STRUCTURE, 2), (64, 65), (256, 257))
# Relative to the norm: below it float64 does not tell graphs apart that differ in a constant's rounding to float32.
_SAME: Final = 1e-7
# How often inputs are drawn until their masks leave most results to compare gradients by.
_DRAWS: Final = 4
_HIDES: Final = -1e4
_REPEATS: Final = 6
# How many assignments are tried where sizes are rounded.
_REMAINDERS: Final = 8
# And where the program computes with numbers that may be others in another call.
_NUMBERS: Final = 4


def check(
    before: GraphModule,
    after: GraphModule,
    *,
    assumptions: Sequence[c.Assumption] = (),
    seed: int = 0,
    bound: float | None = None,
) -> c.Certificate:
    """Decide whether a graph computes what another does.

    Args:
        before: the graph as it was. Its placeholders carry `meta["val"]` or `meta["example_value"]`.
        after: the graph that takes its place, with the same placeholders and outputs in the same order.
        assumptions: what the claim rests on.
        seed: draws inputs and sizes.
        bound: the largest relative error of a claim that is a bound; with None, results may be as far from the truth
            as those of `before`.
    """
    started = time.perf_counter()
    with on_real_tensors():
        found = _Check(before, after, tuple(assumptions), seed, bound).run()
    return dataclasses.replace(found, seconds=time.perf_counter() - started)


@dataclasses.dataclass
class _Variant:
    """Both graphs with certain sizes."""

    before: GraphModule
    after: GraphModule
    wanted: list[Any]
    original: bool
    numbers: Mapping[Any, int]
    masks: Mapping[str, str]

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The shape of each placeholder."""
        return tuple((each[0], each[1]) for each in self.wanted if isinstance(each, tuple))


@dataclasses.dataclass
class _Check:
    before: GraphModule
    after: GraphModule
    assumptions: tuple[c.Assumption, ...]
    seed: int
    bound: float | None
    methods: list[c.Method] = dataclasses.field(default_factory=list)
    differences: list[c.Difference] = dataclasses.field(default_factory=list)
    families: list[sizes.Family] = dataclasses.field(default_factory=list)
    compared: bool = False
    raised: c.Witness | None = None

    def run(self) -> c.Certificate:
        """Try the methods in order."""
        self.kinds = {each.kind for each in self.assumptions}
        blocks = any(map(effects.reads_blocks, (self.before, self.after)))
        if c.BLOCKS not in self.kinds and blocks:
            self.assumptions += (c.Assumption(c.BLOCKS),)
        self.masks = inputs.classes(self.assumptions)
        wrong = effects.compared(self.before, self.after, self.kinds, self.differences)
        self.methods.append(c.Method(name="effects", holds=not wrong, detail=wrong))
        if wrong:
            return self._refuted(c.Witness(method="effects", detail=wrong))
        if structure.same(self.before, self.after):
            self.methods.append(c.Method(name="structure", holds=True))
            return self._certificate(c.PROVED, reason="the same operators on the same operands")
        if blocks:
            self.before, self.after = map(effects.without_blocks, (self.before, self.after))
        self.before, self.after = sizes.with_numbers(*map(interpret.with_constants, (self.before, self.after)))
        try:
            variants = self._variants()
        except Exception as error:  # noqa: BLE001 - a graph may refuse in any way to run; the method says how
            self.methods.append(c.Method(name="algebra", holds=None, detail=_said(error)))
            return self._certificate(c.ASSUMED, reason="the graphs can't be run on small inputs")
        if self.raised is not None:
            return self._refuted(self.raised)
        found = self._algebra(variants)
        if found.verdict != c.REFUTED:
            self.compared |= found.verdict == c.TESTED
            for method in (self._ties, self._integers, self._gradients, self._numbers):
                wrong = method(variants[0])
                if wrong is not None:
                    return self._refuted(wrong)
        return dataclasses.replace(found, methods=tuple(self.methods), differences=tuple(self.differences))

    def _certificate(self, verdict: str, **rest: Any) -> c.Certificate:
        return c.Certificate(
            verdict=verdict,
            methods=tuple(self.methods),
            assumptions=self.assumptions,
            differences=tuple(self.differences),
            **rest,
        )

    def _refuted(self, witness: c.Witness) -> c.Certificate:
        return self._certificate(c.REFUTED, witness=witness, reason=witness.detail)

    def _state(self) -> State:
        for each in self.assumptions:
            if each.kind == c.FILL_HIDES:
                return State(threshold=float(each.detail or _HIDES), empty_rows=c.NO_EMPTY_ROW not in self.kinds)
        return State()

    # ---- sizes

    def _variants(self) -> list[_Variant]:
        """Both graphs with sizes that are small enough, at least one.

        Raises:
            Unsupported: there are none.
        """
        found: list[_Variant] = []
        reason = "no sizes that the guards allow are small enough"
        symbols = sizes.symbols_of(self.before)
        symbolic = any(each.is_integer for each in symbols)
        count = 2 if all(each.is_integer for each in symbols) else _NUMBERS
        count = _REMAINDERS if any(map(sizes.rounds, (self.before, self.after))) else count
        for position, numbers in enumerate(sizes.assignments(self.before, count, self.seed)):
            family = sizes.Family(self.before, self.after, numbers, found=inputs.bounds(self.masks))
            wanted = inputs.shapes(self.before, numbers, {})
            own = _Variant(self.before, self.after, wanted, True, numbers, self.masks)
            fewer: list[_Variant] = []
            few = 1 if symbolic else max(1, 2 - len(found))
            try:
                if not family.learn(run=False):
                    fewer = self._fewer(family, position, found, few)
                    if not fewer:  # a node may have said what it is not
                        family.learn()
            except Exception as error:  # noqa: BLE001 - the reason is raised if there are no other sizes
                reason = _said(error)
                if numbers and self._raises(numbers):
                    shapes = tuple((each[0], each[1]) for each in wanted if isinstance(each, tuple))
                    self.raised = c.Witness(method="effects", sizes=shapes, detail=f"it raises {reason}")
                if sum(math.prod(each[1]) for each in wanted if isinstance(each, tuple)) < _ELEMENTS // 20:
                    found.append(own)
                continue
            self.families.append(family)
            if family.elements <= (_ELEMENTS if symbolic else _FEW):
                found.append(own)
                few = max(1, few - 1)
                if symbolic:
                    found += self._beyond(family) if position == 0 else ()
                    continue
            found += fewer[:few] or self._fewer(family, position, found, few)
            if not found and family.elements <= _ELEMENTS:
                found.append(own)
        if not found:
            raise Unsupported(reason)
        return found

    def _fewer(self, family: sizes.Family, position: int, known: Sequence[_Variant], count: int) -> list[_Variant]:
        """Both graphs with smaller sizes that none of the known ones has, `count` times at most."""
        found: list[_Variant] = []
        # Small ones first, as a check takes as long as there are elements.
        for limit, (keep, start) in itertools.product(
            (_ELEMENTS // 8, _ELEMENTS), ((sizes.STRUCTURE, 5 + position), *_FURTHER)
        ):
            if len(found) >= count:
                break
            variant = self._smaller(family, keep, start, limit)
            if variant is not None and all(variant.shapes != each.shapes for each in (*known, *found)):
                found.append(variant)
        return found

    def _raises(self, numbers: Mapping[Any, int]) -> bool:
        """Whether the second graph raises at sizes at which the first one runs, and runs at those of the first call."""

        def runs(module: GraphModule, numbers: Mapping[Any, int]) -> bool:
            try:
                sizes.traced((module,), inputs.shapes(self.before, numbers, {}))
            except Exception:  # noqa: BLE001 - the caller has the one that counts
                return False
            return True

        return (
            runs(self.before, numbers) and not runs(self.after, numbers) and runs(self.after, sizes.first(self.before))
        )

    def _beyond(self, family: sizes.Family) -> Iterator[_Variant]:
        """Sizes that are larger than the numbers in a graph of symbolic sizes, where the ones tried are smaller."""
        numbers = sizes.sized(family.numbers)
        if all(each <= max(numbers.values()) for each in family.found):
            return
        made = family.smaller(*_LEAST) or {}
        step = max(made.values(), default=0)
        larger = {**family.numbers, **{symbol: number + step - 1 for symbol, number in numbers.items()}}
        if sizes.allowed(self.before, larger):
            variant = self._smaller(dataclasses.replace(family, numbers=larger), *_LEAST, _ELEMENTS)
            if variant is not None:
                yield variant

    def _smaller(self, family: sizes.Family, keep: int, start: int, limit: int) -> _Variant | None:
        """Both graphs with smaller sizes, if they run and have results of the same shapes then."""
        made = family.smaller(keep, start)
        if made is None or all(key == value for key, value in made.items()) or family.elements_of(made) > 2 * limit:
            return None
        before, after = (family.resized(module, made) for module in (self.before, self.after))
        wanted = inputs.shapes(self.before, family.numbers, made)
        try:
            shapes, elements = sizes.traced((before, after), wanted, min(limit, _ELEMENTS))
        except Exception:  # noqa: BLE001 - sizes that a graph can't have; others are tried
            return None
        if shapes[0] != shapes[1] or elements > limit:
            return None
        return _Variant(before, after, wanted, False, family.numbers, inputs.resized(self.masks, made))

    # ---- algebra

    def _algebra(self, variants: Sequence[_Variant]) -> c.Certificate:
        tried, log2 = 0, -math.inf
        opaque: set[str] = set()
        unconfirmed = ""
        for position, variant in enumerate(variants):
            seed = self.seed + position
            try:
                witness, states = self._compare(variant, seed)
            except Exception as error:  # noqa: BLE001 - an operator may refuse residues in any way; the method says how
                self.methods.append(c.Method(name="algebra", holds=None, detail=_said(error)))
                return self._tested(variants, _said(error))
            opaque |= states[0].opaque | states[1].opaque
            if _drawn(states[0]) != _drawn(states[1]):
                # Another order or kind may be claimed, and not that less, or more, is dropped.
                shares = {frozenset(each[2] for each in state.draws) for state in states}
                if c.DRAWS not in self.kinds or (
                    len(shares) > 1 and not any(values.UNIFORM in each for each in shares)
                ):
                    detail = f"the draws {states[0].draws} became {states[1].draws}"
                    self.methods.append(c.Method(name="effects", holds=False, detail=detail))
                    return self._refuted(c.Witness(method="effects", sizes=variant.shapes, detail=detail))
                self.methods.append(c.Method(name="algebra", holds=None, detail="other random numbers are drawn"))
                return self._certificate(c.ASSUMED, reason="other random numbers are drawn")
            if witness is not None:
                confirmed = self._confirmed(variant, witness, opaque)
                if isinstance(confirmed, c.Witness):
                    self.methods.append(c.Method(name="algebra", holds=False, detail=witness.detail))
                    return self._refuted(confirmed)
                if confirmed is None:
                    continue
                unconfirmed = confirmed
                continue
            tried += 1
            self.compared |= states[0].compared or states[1].compared or bool(opaque)
            log2 = max(log2, self._bound(variant, seed, states))
        if not tried:
            unconfirmed = unconfirmed or "equal at their own sizes for numbers, and not at smaller ones"
        if unconfirmed:
            self.methods.append(c.Method(name="algebra", holds=None, detail=unconfirmed))
            return self._tested(variants, unconfirmed)
        words = f", with {', '.join(sorted(opaque))} as unknown functions" if opaque else ""
        detail = f"equal for {tried} assignments of sizes{words}"
        self.methods.append(c.Method(name="algebra", holds=True, detail=detail))
        verdict = c.PROVED if tried > 1 and len({variant.shapes for variant in variants}) > 1 else c.PROVED_FOR_SIZES
        equal, words = predicates.compared(self.before, self.after, self.masks) if verdict == c.PROVED else (None, "")
        if equal is not None:
            self.methods.append(c.Method(name="masks", holds=equal or None, detail=words))
        if equal is False:
            verdict, detail = c.PROVED_FOR_SIZES, f"{detail}; predicates on positions {words}"
        if log2 > _GOAL:
            verdict, detail = c.TESTED, f"{detail}; the bound of the probability is above 2**{_GOAL:.0f}"
        return self._certificate(verdict, probability=log2, sizes=tried, reason=detail)

    def _bound(self, variant: _Variant, seed: int, states: tuple[State, State]) -> float:
        """The logarithm of the probability that graphs that differ are equal so far; more is tried if it is large."""
        once = fields.TOWERS * min(0.0, math.log2(max(state.degree for state in states) / fields.SMALLEST))
        found, turn = once, 0
        while found > _GOAL and once < -1 and turn < _REPEATS:
            turn += 1
            if self._compare(variant, seed + 997 * turn)[0] is not None:
                return 0.0
            found += once
        return found

    def _compare(self, variant: _Variant, seed: int) -> tuple[c.Witness | None, tuple[State, State]]:
        states = self._state(), self._state()
        with values.running(states[0]):
            given = inputs.draw(variant.wanted, variant.masks, seed, numbers=False)
        sides = [
            self._side(module, given, state)
            for module, state in zip((variant.before, variant.after), states, strict=True)
        ]
        if len(sides[0]) != len(sides[1]):
            return c.Witness(method="algebra", detail="the number of outputs differs"), states
        with values.running(states[1]):
            for (place, a), (_, b) in zip(*sides, strict=True):
                detail, index = _difference(a, b)
                if detail:
                    where = f"output {place}" if isinstance(place, int) else f"what is written to {place}"
                    witness = c.Witness(
                        method="algebra",
                        sizes=variant.shapes,
                        seed=seed,
                        output=place,
                        detail=f"{where}: {detail}",
                        index=index,
                    )
                    return witness, states
        return None, states

    def _side(self, module: GraphModule, given: Sequence[Any], state: State) -> list[tuple[int | str, Any]]:
        """The outputs of a graph, and its inputs after it ran."""
        own = inputs.taken(module, given)
        with values.running(state), torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
            # What has no definition here draws by torch's own generator.
            torch.default_generator.manual_seed(self.seed)
            try:
                outputs = interpret.run(module, own)
            except Unsupported as error:
                if not values.into_constant(error):
                    raise
                own = inputs.taken(module, given)
                state.lift = True
                state.draws.clear()
                state.seeds = 0
                outputs = interpret.run(module, own)
        names = [node.name for node in sizes.placeholders(self.before)]
        written = [(name, v) for name, v in zip(names, own, strict=True) if isinstance(v, torch.Tensor)]
        return [*enumerate(outputs), *written]

    # ---- numbers

    def _exact(self, variant: _Variant, seed: int, scale: float) -> list[list[tuple[int | str, Any]]]:
        """What both graphs make of random numbers in float64."""
        given = inputs.draw(variant.wanted, variant.masks, seed, numbers=True, scale=scale)
        given = [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in given]
        found: list[list[tuple[int | str, Any]]] = []
        for module in (variant.before, variant.after):
            with InPrecision(torch.float64):
                found.append(self._side(module, given, State()))
        return found

    def _ties(self, variant: _Variant) -> c.Witness | None:
        """Where the graphs differ for numbers of which some are equal, some zero, and some between integers."""
        if not self.compared:
            return None
        for step in (1.0, 0.25):
            with InPrecision(torch.float64):
                wrong = self._both(variant, self._coarse(variant, step), f"for multiples of {step:g}", _apart)
            if wrong is not None:
                return wrong
        return None

    def _coarse(self, variant: _Variant, step: float, seed: int | None = None) -> list[Any]:
        """Inputs of which some are equal, and some zero."""
        seed = self.seed if seed is None else seed
        given = inputs.draw(variant.wanted, variant.masks, seed, numbers=True, scale=1.5)
        return [(v.double() / step).round() * step if _floating(v) else v for v in given]

    def _integers(self, variant: _Variant) -> c.Witness | None:
        """Where the graphs differ for whole numbers below zero, or for those at which a dtype wraps."""
        small = inputs.draw(variant.wanted, variant.masks, self.seed + 3, numbers=True)
        whole = [i for i, v in enumerate(small) if _whole(v) and i not in self._masked(variant)]
        if not whole:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        wide = [inputs.copied(v) for v in small]
        for index in whole:
            value, limits = small[index], torch.iinfo(small[index].dtype)
            low = max(limits.min, -9)
            small[index] = torch.randint(low, 10, value.shape, generator=generator).to(value.dtype)
            choice = torch.tensor([limits.min, limits.max, limits.min + 1, limits.max - 1, limits.max // 3, 1, 2, low])
            wide[index] = choice[torch.randint(0, 8, value.shape, generator=generator)].to(value.dtype)
        with InPrecision(torch.float64):
            doubles = [[v.double() if _floating(v) else v for v in given] for given in (small, wide)]
            witness = self._both(variant, doubles[0], "for whole numbers", _apart)
            witness = witness or self._both(variant, doubles[1], "for large whole numbers", _apart)
        return witness or self._wide(variant, wide)

    def _wide(self, variant: _Variant, given: Sequence[Any]) -> c.Witness | None:
        """Where large whole numbers differ in a bit, or most bits are lost of what is made of them."""
        words = "for large whole numbers"
        try:
            exact, sides = self._exact_of(variant, given), self._real(variant, given)
        except Exception as error:  # noqa: BLE001 - such as indices that are none; becomes what the method says
            self.methods.append(c.Method(name="numbers", holds=None, detail=_said(error)))
            return None
        for (place, true), (_, a), (_, b) in zip(exact, *sides, strict=True):
            witness = None if _floating(a) and _floating(b) else _unequal(a, b)
            if _floating(a) and _floating(b) and a.shape == b.shape and a.numel():
                error, allowed = relative_error(b, true), relative_error(a, true)
                if bool((a.isfinite() & ~b.isfinite()).any()):
                    self._differ(c.FINITE_RESULTS, words.removeprefix("for "))
                elif math.isfinite(allowed) and _lost(error, allowed, a.dtype):
                    witness = c.Witness(
                        method="numbers", detail=f"a relative error of {error:.2g} in place of {allowed:.2g}"
                    )
            if witness is not None:
                return self._told(variant, place, words, witness)
        return None

    def _gradients(self, variant: _Variant) -> c.Witness | None:
        """Where the gradients of the inputs that have one differ."""
        fakes = [fake_value(node) for node in sizes.placeholders(self.before)]
        asked = [i for i, v in enumerate(fakes) if _floating(v) and v.requires_grad]
        if not asked or c.NO_GRADIENTS in self.kinds:
            return None

        def drawn(seed: int) -> list[Any]:
            return inputs.draw(variant.wanted, variant.masks, seed, numbers=True)

        def ties(seed: int) -> list[Any]:
            given = self._coarse(variant, 1.0, seed)
            for index in asked:
                given[index][:1] = 0.0
            return given

        for draw, words in ((drawn, ""), (ties, ", for numbers of which some are equal or zero")):
            wrong, seed = None, self.seed
            try:
                for seed in range(self.seed + 5, self.seed + 5 + _DRAWS):
                    given = draw(seed)
                    wrong = self._other_gradient(variant, asked, given)
                    read = None if wrong is None else self._numbers_in(variant, asked, given, State())
                    if wrong is not None and self._other_gradient(variant, asked, given, read) is None:
                        self._differ(c.FINITE_INPUTS, f"the gradient of {wrong[0]} by results that are no numbers")
                        wrong = None
                    by_empty = None if wrong is None else self._of_empty_rows(variant, asked, given)
                    if wrong is not None and by_empty:
                        self._differ(c.FILL_HIDES, f"the gradient of {wrong[0]} by rows of which all is filled")
                        wrong = None
                    if wrong is None or by_empty is False:
                        break
            except Exception as error:  # noqa: BLE001 - becomes what the method says
                self.methods.append(c.Method(name="gradients", holds=None, detail=_said(error)))
                return None
            if wrong is not None:
                name, witness = wrong
                detail = f"the gradient of {name}{words}: {witness.detail}"
                self.methods.append(c.Method(name="gradients", holds=False, detail=detail))
                return dataclasses.replace(witness, sizes=variant.shapes, seed=seed, detail=detail)
        self.methods.append(c.Method(name="gradients", holds=True))
        return None

    def _of_empty_rows(self, variant: _Variant, asked: Sequence[int], given: Sequence[Any]) -> bool | None:
        """Whether gradients differ by results alone that are NaN if all fills are -inf, which weigh nothing by a claim.

        What a softmax makes of a row of fills is such a result, and what later layers make of it. None if most results
        are NaN then: too little is left to go by, and other masks may leave more.
        """
        threshold = self._state().threshold
        if threshold == -math.inf:
            return False

        def hide(node: Any, args: Any, kwargs: Any, result: Any) -> None:
            for value in filter(_floating, tree_leaves(result)):
                filled = (value <= threshold) & value.isfinite()
                if bool(filled.any()):
                    value.detach().masked_fill_(filled, -math.inf)

        try:
            read = self._numbers_in(variant, asked, given, State(watch=hide))
            if any(2 * int(each.sum()) < each.numel() for each in read):
                return None
            return self._other_gradient(variant, asked, given, read) is None
        except Exception as error:  # noqa: BLE001 - then the difference stays one
            self.methods.append(c.Method(name="gradients", holds=None, detail=_said(error)))
            return False

    def _ends(
        self, module: GraphModule, asked: Sequence[int], given: Sequence[Any], state: State
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Inputs that ask for gradients at some places, and the results that have any."""
        own = [v.clone().double().requires_grad_(i in asked) if _floating(v) else v for i, v in enumerate(given)]
        return own, [v for _, v in self._side(module, own, state) if _floating(v) and v.requires_grad]

    def _numbers_in(
        self, variant: _Variant, asked: Sequence[int], given: Sequence[Any], state: State
    ) -> list[torch.Tensor]:
        """Where results of the first graph that have gradients are no infinity or NaN."""
        with InPrecision(torch.float64), torch.enable_grad():
            return [v.isfinite() for v in self._ends(variant.before, asked, given, state)[1]]

    def _other_gradient(
        self,
        variant: _Variant,
        asked: Sequence[int],
        given: Sequence[Any],
        read: Sequence[torch.Tensor] | None = None,
    ) -> tuple[str, c.Witness] | None:
        """The first input whose gradients differ, with the difference.

        Args:
            variant: the graphs.
            asked: the places of the inputs with gradients.
            given: the inputs.
            read: where the loss that is differentiated reads the results, as gradients of infinity and NaN say little;
                None reads all.
        """

        def made(module: GraphModule) -> list[torch.Tensor]:
            own, ends = self._ends(module, asked, given, State())
            generator = torch.Generator().manual_seed(self.seed)
            weights = [torch.randn(v.shape, generator=generator, dtype=torch.float64) for v in ends]
            if read is not None:
                weights = [torch.where(each, weight, 0.0) for each, weight in zip(read, weights, strict=True)]
            wanted = [own[i] for i in asked]
            if not ends:
                return list(map(torch.zeros_like, wanted))
            return list(torch.autograd.grad(ends, wanted, weights, materialize_grads=True))

        with InPrecision(torch.float64), torch.enable_grad():
            sides = [made(module) for module in (variant.before, variant.after)]
        for i, a, b in zip(asked, *sides, strict=True):
            witness = _apart(a, b, floor=1e-10)
            if witness is None and bool((a.isfinite() & ~b.isfinite()).any()):
                witness = c.Witness(method="gradients", detail="numbers became infinities or NaN")
            if witness is not None:
                return variant.wanted[i][0], witness
        return None

    def _both(
        self, variant: _Variant, given: Sequence[Any], words: str, compare: Callable[[Any, Any], c.Witness | None]
    ) -> c.Witness | None:
        """Where the graphs differ for inputs that they can have."""
        try:
            sides = self._real(variant, given)
        except Exception as error:  # noqa: BLE001 - such as indices that are none; becomes what the method says
            self.methods.append(c.Method(name="numbers", holds=None, detail=_said(error)))
            return None
        for (place, a), (_, b) in zip(*sides, strict=True):
            witness = compare(a, b)
            if witness is not None:
                return self._told(variant, place, words, witness)
        return None

    def _told(self, variant: _Variant, place: int | str, words: str, witness: c.Witness) -> c.Witness:
        """A witness that says for which inputs results differ."""
        where = f"output {place}" if isinstance(place, int) else f"what is written to {place}"
        detail = f"{where}, {words}: {witness.detail}"
        self.methods.append(c.Method(name="numbers", holds=False, detail=detail))
        return dataclasses.replace(witness, sizes=variant.shapes, seed=self.seed, output=place, detail=detail)

    def _disagreement(self, variant: _Variant, seed: int) -> c.Witness | None:
        for turn, scale in enumerate((1.0, 3.0)):
            sides = self._exact(variant, seed + 31 * turn, scale)
            for (place, a), (_, b) in zip(*sides, strict=True):
                witness = _apart(a, b)
                if witness is not None:
                    where = f"output {place}" if isinstance(place, int) else f"what is written to {place}"
                    detail = f"{where}: {witness.detail}"
                    return dataclasses.replace(
                        witness, sizes=variant.shapes, seed=seed + 31 * turn, output=place, detail=detail
                    )
        return None

    def _confirmed(self, variant: _Variant, witness: c.Witness, opaque: set[str]) -> c.Witness | str | None:
        """What numbers say to a difference over finite fields: a witness, or why there is none.

        None if the graphs agree for larger numbers: then the smaller sizes are none that they can have.
        """
        try:
            found = self._disagreement(variant, self.seed)
        except Exception as error:  # noqa: BLE001 - becomes the reason
            return witness if variant.original and not opaque else f"not confirmed by numbers: {_said(error)}"
        if found is None:
            return f"{witness.detail} over finite fields, and not for numbers in float64"
        if variant.original:
            return found
        for larger in self._larger():
            try:
                again = self._disagreement(larger, self.seed)
            except Exception as error:  # noqa: BLE001 - becomes the reason
                return f"not confirmed at larger sizes: {_said(error)}"
            return again
        return "the graphs differ for smaller sizes, and are too large to be run as they are"

    def _larger(self) -> Iterator[_Variant]:
        for family in self.families:
            sized = sizes.sized(family.numbers)
            numbers = {**family.numbers, **{key: size + max(family.found, default=0) for key, size in sized.items()}}
            wanted = inputs.shapes(self.before, numbers, {})
            if sized and family.found and sizes.allowed(self.before, numbers):
                with contextlib.suppress(Exception):  # sizes that a graph can't have; others are tried
                    if sizes.traced((self.before, self.after), wanted)[1] <= _CONFIRMED:
                        yield _Variant(self.before, self.after, wanted, True, numbers, self.masks)
                    else:
                        yield from self._beyond(family)
            if family.elements <= _CONFIRMED:
                wanted = inputs.shapes(self.before, family.numbers, {})
                yield _Variant(self.before, self.after, wanted, True, family.numbers, self.masks)
            for keep in (1024, 256, 64):
                variant = self._smaller(family, keep, keep + 1, _CONFIRMED)
                if variant is not None:
                    yield variant

    def _tested(self, variants: Sequence[_Variant], reason: str) -> c.Certificate:
        """The verdict where the algebra has none: numbers decide."""
        for variant in variants:
            try:
                witness = self._disagreement(variant, self.seed)
            except Exception as error:  # noqa: BLE001 - becomes the reason
                self.methods.append(c.Method(name="numbers", holds=None, detail=_said(error)))
                return self._certificate(c.ASSUMED, reason=f"{reason}; {_said(error)}")
            if witness is not None and variant.original:
                self.methods.append(c.Method(name="numbers", holds=False, detail=witness.detail))
                return self._refuted(witness)
            if witness is not None:
                confirmed = self._confirmed(variant, witness, set())
                if isinstance(confirmed, c.Witness):
                    self.methods.append(c.Method(name="numbers", holds=False, detail=confirmed.detail))
                    return self._refuted(confirmed)
                if confirmed is not None:
                    self.methods.append(c.Method(name="numbers", holds=None, detail=confirmed))
                    return self._certificate(c.ASSUMED, reason=confirmed)
        self.methods.append(c.Method(name="numbers", holds=True, detail="equal in float64 for random numbers"))
        return self._certificate(c.TESTED, sizes=len(variants), reason=reason)

    # ---- rounding and special values

    def _numbers(self, variant: _Variant) -> c.Witness | None:
        try:
            witness = self._rounding(variant)
            if witness is None:
                self._domain(variant)
        except Exception as error:  # noqa: BLE001 - a kernel may be missing on this device; the method says which
            self.methods.append(c.Method(name="rounding", holds=None, detail=_said(error)))
            return None
        return witness

    def _real(self, variant: _Variant, given: Sequence[Any]) -> list[list[tuple[int | str, Any]]]:
        return [self._side(module, given, State()) for module in (variant.before, variant.after)]

    def _rounding(self, variant: _Variant) -> c.Witness | None:
        """Whether the second graph is as near to the truth as the first one, each in its own dtypes."""
        claimed = self.bound
        for each in self.assumptions:
            if each.kind == c.ROUNDING and each.detail and claimed is None:
                claimed = float(each.detail)
        recast = effects.casts(self.before) != effects.casts(self.after)
        worst, lost = 0.0, ""

        def refuted(detail: str) -> c.Witness:
            self.methods.append(c.Method(name="rounding", holds=False, detail=detail))
            return c.Witness(method="rounding", sizes=variant.shapes, seed=self.seed + 7, output=place, detail=detail)

        for scale, offset, hard in _distributions(variant, recast):
            if hard and {c.ROUNDING, c.NO_OVERFLOW} <= self.kinds:
                continue
            given = inputs.draw(variant.wanted, variant.masks, self.seed + 7, numbers=True, scale=scale)
            if offset:
                given = [
                    v + offset if _floating(v) and i not in self._masked(variant) else v for i, v in enumerate(given)
                ]
            exact = self._exact_of(variant, given)
            first, second = self._real(variant, given)
            for (place, true), (_, own), (_, got) in zip(exact, first, second, strict=True):
                if not _floating(own) or not own.numel():
                    continue
                if bool((own.isfinite() & ~got.isfinite()).any()):
                    self._differ(c.FINITE_RESULTS, hard or "random inputs")
                error, allowed = relative_error(got, true), relative_error(own, true)
                if not math.isfinite(error) or not math.isfinite(allowed):
                    continue
                eps = torch.finfo(own.dtype).eps
                limit = claimed if claimed is not None else 4.0 * allowed + (1.0 if recast else 16.0) * eps
                if hard:
                    # Few bits may be left of what graphs have then; they may lose some more of them, and not all.
                    if c.ROUNDING not in self.kinds and _lost(error, allowed, own.dtype):
                        return refuted(f"output {place}: a relative error of {error:.2g}, for {hard}")
                    continue
                worst = max(worst, error)
                if claimed is not None and error > limit:
                    limit = max(limit, self._sensitivity(variant, given, exact, place, claimed))
                if error > limit and (claimed is not None or c.ROUNDING not in self.kinds):
                    return refuted(f"output {place}: a relative error of {error:.2g}, {limit:.2g} are allowed")
                apart = relative_error(got, own.double())
                free = not recast or c.ROUNDING in self.kinds or claimed is not None
                if not free and apart > 16 * (error + eps):
                    return refuted(
                        f"output {place}: results are {apart:.2g} from those of the dtypes that they were in"
                    )
                if recast and error > 1.5 * allowed + eps / 4:
                    lost = f"output {place} has a relative error of {error:.2g} in place of {allowed:.2g}"
        if lost:
            self.differences.append(c.Difference(kind=c.ROUNDING, detail=lost, covered=c.ROUNDING in self.kinds))
        self.methods.append(c.Method(name="rounding", holds=True, detail=f"largest relative error {worst:.2g}"))
        return None

    def _covers(self, kind: str) -> bool:
        # Scores that outweigh a fill are none that it hides; a zero's sign is a rounding.
        other = {c.NO_OVERFLOW: c.FILL_HIDES, c.FINITE_RESULTS: c.NO_OVERFLOW, c.SIGNED_ZERO: c.ROUNDING}.get(kind)
        return kind in self.kinds or other in self.kinds

    def _masked(self, variant: _Variant) -> set[int]:
        return {i for i, each in enumerate(variant.wanted) if isinstance(each, tuple) and each[0] in self.masks}

    def _exact_of(self, variant: _Variant, given: Sequence[Any]) -> list[tuple[int | str, Any]]:
        wide = [v.double() if _floating(v) else v for v in given]
        with InPrecision(torch.float64):
            return self._side(variant.before, wide, State())

    def _sensitivity(
        self, variant: _Variant, given: Sequence[Any], exact: Sequence[tuple[int | str, Any]], place: Any, bound: float
    ) -> float:
        """The error of an output, if inputs have half of the error that a claim allows: a sharp softmax enlarges it."""
        generator = torch.Generator().manual_seed(self.seed)
        near = [
            v.double() * (1 + bound * (torch.rand(v.shape, generator=generator, dtype=torch.float64) - 0.5))
            if _floating(v)
            else v
            for v in given
        ]
        return relative_error(dict(self._exact_of(variant, near))[place], dict(exact)[place])

    def _differ(self, kind: str, detail: str) -> None:
        found = c.Difference(kind=kind, detail=detail, covered=self._covers(kind))
        if found not in self.differences:
            self.differences.append(found)

    def _local(self, variant: _Variant, plain: Sequence[Any], index: int) -> bool:
        """Whether NaN in an element of an input is in one element of each output of as many, or in none."""
        given = list(plain)
        given[index] = given[index].clone()
        given[index][(0,) * given[index].ndim] = math.nan
        outputs = [v for _, v in self._side(variant.before, given, State()) if isinstance(v, torch.Tensor)]
        return all(int(v.isnan().sum()) <= max(1, v.numel() // given[index].numel()) for v in outputs)

    def _domain(self, variant: _Variant) -> None:
        """Which special values the graphs treat differently.

        Graphs that are equal in each bit for numbers, and of which no element reads a whole row, are compared in each
        bit. Others may round otherwise, and so give another infinity, or NaN in place of one. Which of two zeros is the
        larger one is not defined.
        """
        names = [each[0] if isinstance(each, tuple) else "" for each in variant.wanted]
        plain = inputs.draw(variant.wanted, variant.masks, self.seed + 11, numbers=True)
        floats = [i for i, v in enumerate(plain) if _floating(v) and v.numel() and names[i] not in self.masks]
        sides = self._real(variant, plain)
        exact = all(_unequal(a, b) is None for (_, a), (_, b) in zip(*sides, strict=True))
        exact = exact and all(self._local(variant, plain, index) for index in floats)
        generator = torch.Generator().manual_seed(self.seed)

        def put(value: float, *indices: int) -> list[Any]:
            given = list(plain)
            for index in indices:
                given[index] = given[index].clone()
                if len(indices) > 1 or len(floats) == 1:
                    given[index][torch.rand(given[index].shape, generator=generator) < 0.3] = value
                given[index][(0,) * given[index].ndim] = value
            return given

        probes: list[tuple[str, str, list[Any]]] = [(c.FINITE_INPUTS, "numbers", plain)]
        special = [(math.nan, "NaN"), (math.inf, "an infinity")]
        # What rounds is asked for one sign alone: what it has there is a difference, and none that has to be claimed.
        special += [(-math.inf, "minus infinity")] if exact else []
        for value, word in special:
            kind = c.FINITE_INPUTS if exact or math.isnan(value) else c.NO_OVERFLOW
            if len(floats) == 1 or not self._covers(kind):  # of what is claimed it is enough to know that it is so
                probes += [(kind, f"{word} in {names[index]}", put(value, index)) for index in floats]
            probes += [(kind, f"{word} in inputs", put(value, *floats))] if len(floats) > 1 else []
        for some in ((0.0,), (0.0, -0.0), (-0.0, 1.0)):
            choice = torch.tensor(some)
            zeros = [
                choice[torch.randint(0, len(some), v.shape, generator=generator)].to(v.dtype) if i in floats else v
                for i, v in enumerate(plain)
            ]
            probes.append((c.FINITE_INPUTS, "zeros", zeros))
        large = [v * _large(v.dtype) if i in floats else v for i, v in enumerate(plain)]
        probes.append((c.NO_OVERFLOW, "inputs near the largest number", large))
        hidden = [i for i, v in enumerate(plain) if isinstance(v, torch.Tensor) and v.dtype == torch.bool and v.ndim]
        if hidden:
            given = list(plain)
            for index in hidden:
                given[index] = plain[index].clone()
                given[index][..., :1, :] = False
            probes.append((c.NO_EMPTY_ROW, f"a row of {names[hidden[0]]} that hides everything", given))
        for kind, detail, given in probes if floats else ():
            sides = self._real(variant, given)
            pairs = [(a, b) for (_, a), (_, b) in zip(*sides, strict=True)]
            if not all(_alike(a, b, exact) for a, b in pairs):
                self._differ(kind, detail)
            if detail == "zeros" and exact and not self.compared and not all(_same_signs(a, b) for a, b in pairs):
                self._differ(c.SIGNED_ZERO, "the sign of a zero")
        found = ", ".join(each.kind for each in self.differences)
        self.methods.append(c.Method(name="domain", holds=not found, detail=found))


def _said(error: BaseException) -> str:
    text = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
    return text.strip().partition("\n")[0][:300]


def _drawn(state: State) -> tuple[list[Any], list[Any]]:
    """The draws of a run: what is dropped in its order, and numbers by their seeds."""
    dropped = [each[1:] for each in state.draws if each[2] != values.UNIFORM]
    return dropped, sorted(each for each in state.draws if each[2] == values.UNIFORM)


def _lost(error: float, allowed: float, dtype: torch.dtype) -> bool:
    """Whether most bits of a result are lost where the graph as it was lost some, or none."""
    return error > 64.0 * allowed + 4.0 * math.sqrt(torch.finfo(dtype).eps)


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _distributions(variant: _Variant, recast: bool) -> Iterator[tuple[float, float, str]]:
    """Scales and offsets of inputs to round, the hard ones with words for them."""
    yield from ((1.0, 0.0, ""), (4.0, 0.0, ""), (1.0, 30.0, "")) if recast else ((1.0, 0.0, ""),)
    dtypes = [each[3] for each in variant.wanted if isinstance(each, tuple) and each[3].is_floating_point]
    if dtypes:
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        yield 200.0, 0.0, "inputs of some hundreds"
        yield 1.0, 0.3 / math.sqrt(eps), "inputs that are far from zero, and near each other"
        yield 30 * eps, 0.0, "inputs near zero"


def _large(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).max) / 4 if dtype != torch.float16 else 1e3


def _whole(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()


def _alike(a: Any, b: Any, exact: bool) -> bool:
    """Whether infinities and NaN are in the same places; if results are exact, the same ones with the same numbers."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return True
    if not _floating(a):
        return not exact or torch.equal(a, b)
    if not exact:
        return torch.equal(a.isfinite(), b.isfinite())
    near = math.sqrt(torch.finfo(a.dtype).eps)
    return bool(torch.isclose(a, b, rtol=near, atol=near, equal_nan=True).all())


def _same_signs(a: Any, b: Any) -> bool:
    """Whether zeros have the same signs."""
    return not _floating(a) or torch.equal(a.signbit() & (a == 0), b.signbit() & (b == 0))


def _unequal(a: Any, b: Any) -> c.Witness | None:
    """Where two results differ in a bit; zeros of both signs are equal, and all NaN."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
        return _apart(a, b)
    differ = (a != b) & ~(a.isnan() & b.isnan())
    if not bool(differ.any()):
        return None
    index = tuple(int(i) for i in torch.unravel_index(differ.int().argmax(), differ.shape))
    before, after = a[index].item(), b[index].item()
    return c.Witness(method="numbers", detail=f"element {list(index)} was {before} and is {after}", index=index)


def _apart(a: Any, b: Any, floor: float = 0.0) -> c.Witness | None:
    """Where two results differ by more than rounding in float64."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        if a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b):
            return None
        words = ["a tensor" if isinstance(each, torch.Tensor) else str(each) for each in (a, b)]
        return c.Witness(method="numbers", detail=" became ".join(words))
    if a.shape != b.shape:
        return c.Witness(method="numbers", detail=f"the shape {list(a.shape)} became {list(b.shape)}")
    if not a.numel():
        return None
    x, y = (v.to(torch.complex128 if v.is_complex() else torch.float64) for v in (a, b))
    # Rows that attend to nothing are compared by the probes of special values.
    both = x.isfinite() & y.isfinite()
    gap = torch.where(both, (x - y).abs(), 0.0)
    size = torch.where(both, x.abs(), 0.0).max().clamp_min(1e-30)
    if not bool(gap.max() > _SAME * size + floor):
        lost = (x.isfinite() != y.isfinite()) & ~(x.isnan() | y.isnan())
        if not bool(lost.any()):
            return None
        gap = lost.double()
    index = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    before, after = (float(v[index].real) for v in (x, y))
    return c.Witness(
        method="numbers",
        detail=f"element {list(index)} was {before:.6g} and is {after:.6g}",
        index=index,
        before=before if math.isfinite(before) else None,
        after=after if math.isfinite(after) else None,
    )


def _difference(a: Any, b: Any) -> tuple[str, tuple[int, ...]]:
    """Where two results differ over finite fields."""
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return "one is no tensor", ()
    if not isinstance(a, torch.Tensor):
        return ("", ()) if a == b else (f"{a} became {b}", ())
    if a.shape != b.shape:
        return f"the shape {list(a.shape)} became {list(b.shape)}", ()
    x, y = (values.number_of(v) for v in (a, b))
    same = values.equal(x, y).all(0)
    if bool(same.all()):
        return "", ()
    index = (~same).nonzero()[0].tolist()
    return f"element {index} differs, and {int((~same).sum())} of {same.numel()}", tuple(index)
