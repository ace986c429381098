"""The checker: two graphs go in, a certificate comes out. It knows nothing of whoever made the second of the first."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule

from omnicomp._torch.autograd.run_in_precision import InPrecision, on_real_tensors
from omnicomp.analysis.accuracy import relative_error
from omnicomp.analysis.certify import certificate as c
from omnicomp.analysis.certify import effects, fields, inputs, interpret, sizes, structure, values
from omnicomp.analysis.certify.values import State, Unsupported

_GOAL: Final = -40.0
# Elements of all results of both graphs, up to which they run over fields, and on numbers to confirm a difference.
_ELEMENTS: Final = 400_000
_CONFIRMED: Final = 40_000_000
# Relative to the norm: below it float64 does not tell graphs apart that differ in a constant's rounding to float32.
_SAME: Final = 1e-7
_HIDES: Final = -1e4
_REPEATS: Final = 6


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

    def run(self) -> c.Certificate:
        """Try the methods in order."""
        self.kinds = {each.kind for each in self.assumptions}
        if c.BLOCKS not in self.kinds and any(map(effects.reads_blocks, (self.before, self.after))):
            self.assumptions += (c.Assumption(c.BLOCKS),)
        self.masks = inputs.classes(self.assumptions)
        wrong = effects.compared(self.before, self.after, self.kinds, self.differences)
        self.methods.append(c.Method(name="effects", holds=not wrong, detail=wrong))
        if wrong:
            return self._refuted(c.Witness(method="effects", detail=wrong))
        if structure.same(self.before, self.after):
            self.methods.append(c.Method(name="structure", holds=True))
            return self._certificate(c.PROVED, reason="the same operators on the same operands")
        try:
            variants = self._variants()
        except Exception as error:  # noqa: BLE001 - a graph may refuse in any way to run; the method says how
            self.methods.append(c.Method(name="algebra", holds=None, detail=_said(error)))
            return self._certificate(c.ASSUMED, reason="the graphs can't be run on small inputs")
        found = self._algebra(variants)
        if found.verdict != c.REFUTED:
            wrong = self._numbers(variants[0])
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
                return State(threshold=float(each.detail or _HIDES))
        return State()

    # ---- sizes

    def _variants(self) -> list[_Variant]:
        """Both graphs with sizes that are small enough, at least one.

        Raises:
            Unsupported: there are none.
        """
        found: list[_Variant] = []
        reason = "no sizes that the guards allow are small enough"
        for position, numbers in enumerate(sizes.assignments(self.before, 2, self.seed)):
            family = sizes.Family(self.before, self.after, numbers, found=inputs.bounds(self.masks))
            try:
                family.learn()
            except Exception as error:  # noqa: BLE001 - the reason is raised if there are no other sizes
                reason = _said(error)
                wanted = inputs.shapes(self.before, numbers, {})
                if sum(math.prod(each[1]) for each in wanted if isinstance(each, tuple)) < _ELEMENTS // 20:
                    found.append(_Variant(self.before, self.after, wanted, True, numbers, self.masks))
                continue
            self.families.append(family)
            small = family.elements <= _ELEMENTS
            if small and (position == 0 or numbers):
                wanted = inputs.shapes(self.before, numbers, {})
                found.append(_Variant(self.before, self.after, wanted, True, numbers, self.masks))
            if numbers and small:
                continue
            for keep, start in ((sizes.STRUCTURE, 5 + position), (sizes.STRUCTURE, 7), (64, 65), (256, 257)):
                variant = self._smaller(family, keep, start, _ELEMENTS)
                if variant is not None and all(variant.shapes != each.shapes for each in found):
                    found.append(variant)
                    if len(found) > 1 or numbers:
                        break
        if not found:
            raise Unsupported(reason)
        return found

    def _smaller(self, family: sizes.Family, keep: int, start: int, limit: int) -> _Variant | None:
        """Both graphs with smaller sizes, if they run and have results of the same shapes then."""
        made = family.smaller(keep, start)
        if made is None or all(key == value for key, value in made.items()):
            return None
        before, after = (family.resized(module, made) for module in (self.before, self.after))
        wanted = inputs.shapes(self.before, family.numbers, made)
        try:
            shapes, elements = sizes.traced((before, after), wanted)
        except Exception:  # noqa: BLE001 - sizes that a graph can't have; others are tried
            return None
        if shapes[0] != shapes[1] or elements > limit:
            return None
        return _Variant(before, after, wanted, False, family.numbers, inputs.resized(self.masks, made))

    # ---- algebra

    def _algebra(self, variants: Sequence[_Variant]) -> c.Certificate:
        tried, log2, compared = 0, -math.inf, False
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
            compared |= states[0].compared or states[1].compared
            log2 = max(log2, self._bound(variant, seed, states))
        if not tried:
            unconfirmed = unconfirmed or "equal at their own sizes for numbers, and not at smaller ones"
        if unconfirmed:
            self.methods.append(c.Method(name="algebra", holds=None, detail=unconfirmed))
            return self._tested(variants, unconfirmed)
        if compared:
            witness = self._ties(variants[0])
            if witness is not None:
                self.methods.append(c.Method(name="numbers", holds=False, detail=witness.detail))
                return self._refuted(witness)
        words = f", with {', '.join(sorted(opaque))} as unknown functions" if opaque else ""
        detail = f"equal for {tried} assignments of sizes{words}"
        self.methods.append(c.Method(name="algebra", holds=True, detail=detail))
        verdict = c.PROVED if tried > 1 and len({variant.shapes for variant in variants}) > 1 else c.PROVED_FOR_SIZES
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
        with values.running(state), torch.random.fork_rng(devices=[]):
            # What has no definition here draws by torch's own generator.
            torch.manual_seed(self.seed)
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
        """Where the graphs differ for small integers, of which some are equal and some zero."""
        given = inputs.draw(variant.wanted, variant.masks, self.seed, numbers=True, scale=1.5)
        given = [v.double().round() if _floating(v) else v for v in given]
        try:
            with InPrecision(torch.float64):
                sides = [self._side(module, given, State()) for module in (variant.before, variant.after)]
        except Exception as error:  # noqa: BLE001 - becomes what the method says
            self.methods.append(c.Method(name="numbers", holds=None, detail=_said(error)))
            return None
        for (place, a), (_, b) in zip(*sides, strict=True):
            witness = _apart(a, b)
            if witness is not None:
                detail = f"output {place}, for small integers: {witness.detail}"
                return dataclasses.replace(witness, sizes=variant.shapes, seed=self.seed, output=place, detail=detail)
        return None

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
        for scale, offset in ((1.0, 0.0), (4.0, 0.0), (1.0, 30.0)) if recast else ((1.0, 0.0),):
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
                error, allowed = relative_error(got, true), relative_error(own, true)
                if not math.isfinite(error) or not math.isfinite(allowed):
                    continue
                roundings = 1.0 if recast else 16.0
                limit = claimed if claimed is not None else 4.0 * allowed + roundings * torch.finfo(own.dtype).eps
                worst = max(worst, error)
                if error > limit and (claimed is not None or c.ROUNDING not in self.kinds):
                    detail = f"output {place}: a relative error of {error:.2g}, {limit:.2g} are allowed"
                    self.methods.append(c.Method(name="rounding", holds=False, detail=detail))
                    return c.Witness(
                        method="rounding", sizes=variant.shapes, seed=self.seed + 7, output=place, detail=detail
                    )
                if recast and error > 1.5 * allowed + torch.finfo(own.dtype).eps / 4:
                    lost = f"output {place} has a relative error of {error:.2g} in place of {allowed:.2g}"
        if lost:
            self.differences.append(c.Difference(kind=c.ROUNDING, detail=lost, covered=c.ROUNDING in self.kinds))
        self.methods.append(c.Method(name="rounding", holds=True, detail=f"largest relative error {worst:.2g}"))
        return None

    def _covers(self, kind: str) -> bool:
        # Scores that outweigh a fill are none that it hides.
        return kind in self.kinds or (kind == c.NO_OVERFLOW and c.FILL_HIDES in self.kinds)

    def _masked(self, variant: _Variant) -> set[int]:
        return {i for i, each in enumerate(variant.wanted) if isinstance(each, tuple) and each[0] in self.masks}

    def _exact_of(self, variant: _Variant, given: Sequence[Any]) -> list[tuple[int | str, Any]]:
        wide = [v.double() if _floating(v) else v for v in given]
        with InPrecision(torch.float64):
            return self._side(variant.before, wide, State())

    def _domain(self, variant: _Variant) -> None:
        """Which special values the graphs treat differently."""
        names = [each[0] if isinstance(each, tuple) else "" for each in variant.wanted]
        plain = inputs.draw(variant.wanted, variant.masks, self.seed + 11, numbers=True)
        floats = [i for i, v in enumerate(plain) if _floating(v) and v.numel() and names[i] not in self.masks]
        probes: list[tuple[str, str, list[Any]]] = []
        for name, value in (("an infinity", math.inf), ("NaN", math.nan)):
            given = list(plain)
            for index in floats[:1]:
                given[index] = plain[index].clone()
                given[index].reshape(-1)[:1] = value
                given[index][(0,) * plain[index].ndim] = value
            probes.append((c.FINITE_INPUTS, f"{name} in {names[floats[0]] if floats else ''}", given))
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
            first, second = self._real(variant, given)
            if any(not _alike(a, b) for (_, a), (_, b) in zip(first, second, strict=True)):
                self.differences.append(c.Difference(kind=kind, detail=detail, covered=self._covers(kind)))
        found = ", ".join(each.kind for each in self.differences)
        self.methods.append(c.Method(name="domain", holds=not found, detail=found))


def _said(error: BaseException) -> str:
    text = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
    return text.strip().partition("\n")[0][:300]


def _drawn(state: State) -> tuple[list[Any], list[Any]]:
    """The draws of a run: what is dropped in its order, and numbers by their seeds."""
    dropped = [each[1:] for each in state.draws if each[2] != values.UNIFORM]
    return dropped, sorted(each for each in state.draws if each[2] == values.UNIFORM)


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _large(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).max) / 4 if dtype != torch.float16 else 1e3


def _alike(a: Any, b: Any) -> bool:
    """Whether infinities and NaN are in the same places."""
    if not _floating(a) or not _floating(b):
        return True
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())


def _apart(a: Any, b: Any) -> c.Witness | None:
    """Where two results differ by more than rounding in float64."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None if a is b or a == b else c.Witness(method="numbers", detail=f"{a} became {b}")
    if a.shape != b.shape:
        return c.Witness(method="numbers", detail=f"the shape {list(a.shape)} became {list(b.shape)}")
    if not a.numel():
        return None
    x, y = (v.to(torch.complex128 if v.is_complex() else torch.float64) for v in (a, b))
    # Rows that attend to nothing are compared by the probes of special values.
    both = x.isfinite() & y.isfinite()
    gap = torch.where(both, (x - y).abs(), 0.0)
    size = torch.where(both, x.abs(), 0.0).max().clamp_min(1e-30)
    if not bool(gap.max() > _SAME * size):
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
