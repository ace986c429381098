"""Random programs: lines of Python, each drawn to fit the tensors that the lines before have made.

A line is kept if eager runs it, for both sizes that the program is called with. So templates need not know which shapes
and dtypes an operator takes.
"""

import dataclasses
import math
import random
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import fuzz_templates as templates
import torch
from fuzz_checks import load, run
from torch import Tensor

_LARGEST = 2000  # elements
_MAGNITUDE = 300.0


@dataclasses.dataclass(frozen=True)
class Statement:
    """A line, and the `with` that it is in."""

    text: str
    region: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, from which parts can be taken.

    Attributes:
        inputs: name and expression of each, of earlier names and the size `n`.
        arguments: names of inputs; one may be there twice.
        attributes: name and expression of each parameter (a name that begins with `p`), buffer (`b`) and module (`m`).
        statements: the lines of `forward`.
        outputs: expressions.
        sizes: `n` in each call.
        backward: whether gradients are compared.
        dynamic: of `torch.compile`.
        options: of the backend.
    """

    inputs: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...]
    attributes: tuple[tuple[str, str], ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    sizes: tuple[int, ...]
    backward: bool = True
    dynamic: bool | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def source(self) -> str:
        """The program as text."""
        state = [f"self.register_buffer({n!r}, {e})" if n[0] == "b" else f"self.{n} = {e}" for n, e in self.attributes]
        leaves = [name for name, made in self.inputs if made.startswith("leaf(")]
        flags = [f"BACKWARD = {self.backward}"] if not self.backward else []
        flags += ["DRAWS = True"] if self.draws() else []
        outputs = [*self.outputs, *(["drawn"] if self.draws() else [])]
        flags += [f"DYNAMIC = {self.dynamic}"] if self.dynamic is not None else []
        lines = [
            f"SIZES = {self.sizes}",
            *flags,
            "",
            "",
            "def inputs(n):",
            *(f"    {name} = {made}" for name, made in self.inputs),
            f"    return [{', '.join(self.arguments)}], [{', '.join(leaves)}]",
            "",
            "",
            "class Program(nn.Module):",
            *(["    def __init__(self):", "        super().__init__()"] if state else []),
            *(f"        {line}" for line in state),
            *([""] if state else []),
            f"    def forward(self, {', '.join(parameters(self.arguments))}):",
            *(["        drawn = 0"] if self.draws() else []),
            *_body(self.statements),
            f"        return {', '.join(outputs)}" + ("," if len(outputs) == 1 else ""),
        ]
        return "\n".join(lines) + "\n"

    def draws(self) -> bool:
        """Whether it draws random numbers. They are returned, as compilers leave out what is not needed."""
        return any("drawn" in statement.text for statement in self.statements)

    def all_options(self) -> dict[str, Any]:
        """The options, and the one by which Inductor draws eager's numbers."""
        draws = {"fallback_random": True} if self.draws() and self.options.get("lowerings") != ["eager"] else {}
        return {**self.options, **draws}


def parameters(arguments: tuple[str, ...]) -> list[str]:
    """Names of `forward`'s parameters: an input that comes twice has two."""
    return [name if name not in arguments[:i] else f"{name}_{i}" for i, name in enumerate(arguments)]


def _body(statements: tuple[Statement, ...]) -> list[str]:
    lines: list[str] = []
    region = ""
    for statement in statements:
        if statement.region != region and statement.region:
            lines.append(f"        with {statement.region}:")
        region = statement.region
        lines.append(textwrap.indent(statement.text, " " * (12 if region else 8)))
    return lines


_MAKES: tuple[tuple[float, list[str]], ...] = (
    (5, templates.POINTWISE),
    (4, templates.VIEWS),
    (2, templates.REDUCTIONS),
    (1.2, templates.INDEXING),
    (1.5, templates.PRODUCTS),
    (1.2, templates.OTHERS),
)
_HOLE = re.compile(r"\{(\w+?)([=~]?)\}")
_KINDS: dict[str, Callable[[torch.dtype], bool]] = {
    "T": lambda d: True,
    "F": lambda d: d.is_floating_point,
    "C": lambda d: d.is_complex,
    "N": lambda d: d.is_floating_point or d.is_complex,
    "R": lambda d: not d.is_complex and d != torch.bool,
    "I": lambda d: not d.is_complex and not d.is_floating_point and d != torch.bool,
    "B": lambda d: d == torch.bool,
}


class _Misfit(Exception):
    """A hole that nothing fits."""


def draw(seed: int, *, lowerings: str = "mixed") -> Program:
    """A random program.

    Args:
        seed: the same program for the same seed.
        lowerings: `eager`, `inductor`, or `mixed` for mostly eager.
    """
    for attempt in range(100):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = _Drawing(random.Random(f"{seed} {attempt}")).program(lowerings)
        if program is not None:
            return program
    raise RuntimeError(f"seed {seed} gives no program")


class _Drawing:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._sizes = self._some([(4,), (4, 4), (4, 6), (3, 5, 3), (5, 1)], [3, 3, 4, 1, 0.5])
        self._dims = [self._one(["n", "2", "3", "4", "6"]) for _ in range(3)]
        self._inputs: list[tuple[str, str]] = []
        self._arguments: list[str] = []
        self._attributes: list[tuple[str, str]] = []
        self._statements: list[Statement] = []
        self._worlds: list[dict[str, Any]] = []
        self._count = 0
        self._draws = rng.random() < 0.15
        self._backward = rng.random() < 0.65

    def _one(self, choices: Any) -> Any:
        return self._rng.choice(choices)

    def _some(self, choices: Any, weights: Any) -> Any:
        return self._rng.choices(choices, weights)[0]

    def program(self, lowerings: str) -> Program | None:
        self._draw_inputs()
        if not self._restart():
            return None
        wanted = self._rng.randint(5, 40)
        region = ""
        for _ in range(wanted * 6):
            if len(self._statements) >= wanted:
                break
            if self._rng.random() < 0.1:
                region = self._some(
                    ["", "torch.no_grad()", "torch.enable_grad()", "autocast()", "torch.set_grad_enabled(False)"],
                    [6, 2, 1, 1, 0.5],
                )
            self._add(region)
        outputs = self._outputs()
        program = Program(
            inputs=tuple(self._inputs),
            arguments=tuple(self._arguments),
            attributes=tuple(self._attributes),
            statements=tuple(self._statements),
            outputs=tuple(outputs),
            sizes=self._sizes,
            backward=self._backward,
            dynamic=self._some([None, True, False], [6, 2, 1]),
            options=self._options(lowerings),
        )
        error = _error(program)
        if error and program.backward:
            program = dataclasses.replace(program, backward=False)
            error = _error(program)
        if error:
            return None
        if self._rng.random() < 0.04:
            refusal = Statement(f"x0 = torch.ops.fuzz.refuse({self._arguments[0]})")
            place = self._rng.randint(0, len(self._statements))
            statements = (*self._statements[:place], refusal, *self._statements[place:])
            program = dataclasses.replace(program, statements=statements, outputs=("x0", *program.outputs))
        return program

    def _options(self, lowerings: str) -> dict[str, Any]:
        which = lowerings if lowerings != "mixed" else self._some(["eager", "inductor", "cut"], [8, 1.5, 0.5])
        options: dict[str, Any] = {}
        if which == "eager":
            options["lowerings"] = ["eager"]
        elif which == "cut" or self._rng.random() < 0.25:
            cut = self._rng.sample(
                ["aten.mul", "aten.add", "aten.sum", "aten.view", "aten.copy", "aten.mm", "aten.clone"], 3
            )
            options["lowerings"] = {"*": ["inductor", "eager"], **{operator: "eager" for operator in cut}}
        if self._rng.random() < 0.1:
            options["verify"] = "first"
        return options

    def _shape(self) -> str:
        dims = self._dims[self._rng.choice([0, 0, 1, 1, 1, 2, 3]) :]
        dims = ["1" if self._rng.random() < 0.1 else dim for dim in dims]
        return ", ".join(dims)

    def _draw_inputs(self) -> None:
        for i in range(self._rng.randint(1, 5)):
            name = f"a{i}"
            shape = self._shape()
            comma = ", " if shape else ""
            dtype = self._some(["F32", "F16", "BF16", "F64", "C64"], [8, 1.5, 2, 1, 1])
            made = self._some(
                [
                    f"leaf({shape}{comma}dtype={dtype})",
                    f"normal({shape}{comma}dtype={dtype})",
                    f"ints({shape}{comma}dtype={self._one(['I64', 'I64', 'I32', 'U8'])})",
                    f"bools({shape})",
                ],
                [6, 3, 1.5, 1],
            )
            if i == 0:
                made = (
                    f"{'leaf' if self._rng.random() < 0.6 else 'normal'}({self._dims[0]}, {self._dims[1]}, dtype=F32)"
                )
            if i and self._rng.random() < 0.2:
                base = self._one(self._inputs)[0]
                made = base + self._one(
                    [".t()", "[1:]", "[:1]", ".detach()", ".view(-1)", "[..., ::2]", ".mT", ".clone()"]
                )
            elif self._rng.random() < 0.1 and "," in shape:
                made = f"normal({shape}{comma}dtype={dtype}).mT"
            self._inputs.append((name, made.replace(", dtype=F32", "")))
        self._inputs = [(n, m) for n, m in self._inputs if self._sound(n)]
        names = [name for name, _ in self._inputs]
        self._arguments = list(names)
        if self._rng.random() < 0.08:
            self._arguments.append(self._one(names))
        self._inputs += [("size", "n"), ("scalar", repr(round(self._rng.uniform(0.5, 1.5), 2)))]
        self._arguments += ["size", "scalar"]
        for i in range(self._rng.choice([0, 0, 1, 2])):
            shape = self._shape().replace("n", "2") or "2"
            self._attributes.append((f"p{i}", f"parameter({shape})"))
        for i in range(self._rng.choice([0, 0, 1, 2])):
            shape = self._shape().replace("n", "2") or "2"
            self._attributes.append((f"b{i}", f"normal({shape})"))

    def _sound(self, name: str) -> bool:
        """Whether an input can be made, of inputs before it that can."""
        kept = []
        for other, made in self._inputs:
            try:
                names = load(_inputs_source([*kept, (other, made)]))
                for size in set(self._sizes):
                    names["inputs"](size)
            except Exception:
                if other == name:
                    return False
                continue
            kept.append((other, made))
        return True

    def _restart(self) -> bool:
        """Make the tensors of both sizes again, up to the last statement."""
        self._worlds = []
        program = Program(
            tuple(self._inputs), tuple(self._arguments), tuple(self._attributes), (), ("size",), self._sizes
        )
        for size in sorted(set(self._sizes)):
            names = load(program.source())
            torch.manual_seed(0)
            module = names["Program"]()
            arguments, _ = names["inputs"](size)
            world = {
                **names,
                "self": module,
                **dict(zip(parameters(program.arguments), arguments, strict=True)),
                "drawn": 0,
            }
            self._worlds.append(world)
        return all(self._execute(statement) for statement in self._statements)

    def _execute(self, statement: Statement) -> bool:
        text = statement.text if not statement.region else f"with {statement.region}:\n    {statement.text}"
        try:
            code = compile(text, "<drawn>", "exec")
            for world in self._worlds:
                exec(code, world)
        except Exception:
            return False
        return all(_plain(value) for world in self._worlds for value in world.values() if isinstance(value, Tensor))

    def _add(self, region: str) -> None:
        before = list(self._attributes)
        try:
            text = self._statement()
        except _Misfit:
            self._attributes = before
            return
        if len(self._attributes) != len(before) and not self._restart():
            self._attributes = before
            self._restart()
            return
        statement = Statement(text, region)
        if self._execute(statement) and (not self._backward or self._differentiable()):
            self._statements.append(statement)
        else:
            self._attributes = before
            self._restart()

    def _differentiable(self) -> bool:
        """Whether nothing that a backward needs was written to."""
        for world in self._worlds:
            tensors = [v for v in world.values() if isinstance(v, Tensor) and v.requires_grad and v.numel()]
            total: Any = 0
            try:
                for value in tensors:
                    total = total + (value.real if value.is_complex() else value).sum().double()
                leaves = [*(v for v in tensors if v.is_leaf), *world["self"].parameters()]
                if isinstance(total, Tensor) and leaves:
                    torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
            except RuntimeError:
                return False
        return True

    def _statement(self) -> str:
        kind = self._some(["make", "pair", "write", "state", "break", "alias"], [10, 0.7, 2.5, 0.7, 0.15, 0.2])
        if kind == "write":
            return self._filled(self._one(templates.WRITES))
        if kind == "state":
            text = self._filled(self._one(templates.STATE))
            return text
        if kind == "break":
            return self._filled(self._one(templates.BREAKS))
        if kind == "alias":
            return f"{self._new()} = {self._tensor('T', '', None)}"
        if kind == "pair":
            made = self._filled(self._one(templates.PAIRS))
            return f"{self._new()}, {self._new()} = {made}"
        if self._draws and self._rng.random() < 0.2:
            name = self._new()
            return f"{name} = {self._filled(self._one(templates.RANDOM))}; drawn = drawn + {name}.sum()"
        else:
            made = self._one(self._some([m for _, m in _MAKES], [w for w, _ in _MAKES]))
        return f"{self._new()} = {self._filled(made)}"

    def _new(self) -> str:
        self._count += 1
        return f"x{self._count}"

    def _filled(self, template: str) -> str:
        """A template with its holes filled."""
        first: list[str] = []

        def fill(match: re.Match[str]) -> str:
            hole, relation = match.groups()
            if hole == "1":
                return first[0]
            if hole[0].isupper() and hole[0] in _KINDS:
                name = self._tensor(hole, relation, first[0] if first and relation else None)
                first.append(name)
                return name
            return self._hole(hole, first[0] if first else "")

        return _HOLE.sub(fill, template)

    def _tensor(self, hole: str, relation: str, first: str | None) -> str:
        world = self._worlds[0]
        fits = _KINDS[hole[0]]
        names = [n for n, v in world.items() if isinstance(v, Tensor) and n[0] in "ax" and fits(v.dtype)]
        if hole[1:] == "1":
            names = [n for n in names if world[n].dim() == 1]
        if first is not None:
            names = [n for n in names if all(_related(w[first], w[n], relation) for w in self._worlds)]
        if not names:
            raise _Misfit
        return self._rng.choices(names, [1.0 + 3.0 * i / len(names) for i in range(len(names))])[0]

    def _hole(self, hole: str, first: str) -> str:
        rng, world = self._rng, self._worlds[0]
        value = world.get(first)
        rank = value.dim() if isinstance(value, Tensor) else 0
        if hole in ("d", "e"):
            dims = list(range(-rank, rank)) or [0]
            return str(rng.choice(dims))
        if hole == "s":
            return rng.choice(["0.5", "2.0", "-0.5", "1.25", "0.1", "0", "1", "3", "scalar"])
        if hole == "k":
            return str(rng.randint(1, 3))
        if hole == "D":
            return rng.choice(["F16", "BF16", "F32", "F32", "F64", "I64", "I32", "BOOL"])
        if hole == "ix":
            return rng.choice(templates.INDICES)
        if hole == "perm":
            return ", ".join(map(str, rng.sample(range(rank), rank))) or "()"
        if hole == "shape":
            return self._reshaped(first, value)
        if hole in ("b", "p"):
            names = [name for name, _ in self._attributes if name[0] == hole]
            if not names:
                raise _Misfit
            return rng.choice(names)
        if hole == "x":
            return self._new()
        if hole == "w":
            return f"self.{self._attribute('p', f'parameter({rng.randint(1, 5)}, {self._last(value)})')}"
        return self._module(hole, first)

    def _last(self, value: Any) -> int:
        if not isinstance(value, Tensor) or not value.dim():
            raise _Misfit
        return value.shape[-1]

    def _attribute(self, kind: str, made: str) -> str:
        name = f"{kind}{sum(n[0] == kind for n, _ in self._attributes)}"
        self._attributes.append((name, made))
        return name

    def _module(self, hole: str, first: str) -> str:
        rng, world = self._rng, self._worlds[0]
        rank = {"conv": rng.choice((3, 4)), "pool": 4, "bn": rng.choice((2, 3)), "linear": 0}.get(hole, 0)
        if hole in ("linear", "bn", "embedding", "lstm", "mha", "conv", "pool"):
            kind = "I" if hole == "embedding" else "F"
            names = [
                n
                for n, v in world.items()
                if isinstance(v, Tensor) and n[0] in "ax" and _KINDS[kind](v.dtype) and v.dim() and v.numel()
                and (kind == "I" or v.dtype == torch.float32)
            ]  # fmt: skip
            if not names:
                raise _Misfit
            x = rng.choice(names)
            v = world[x]
            if hole == "linear":
                module = self._attribute("m", f"nn.Linear({v.shape[-1]}, {rng.randint(1, 5)})")
                return f"self.{module}({x})"
            if hole == "bn":
                module = self._attribute("m", f"nn.BatchNorm1d({v.shape[1] if v.dim() > 1 else 3})")
                return f"self.{module}({x})"
            if hole == "embedding":
                module = self._attribute("m", f"nn.Embedding(4, {rng.randint(1, 5)})")
                return f"self.{module}({x}.clamp(0, 3))"
            if hole == "lstm":
                cell = rng.choice(("GRU", "LSTM"))
                return f"self.{self._attribute('m', f'nn.{cell}({v.shape[-1]}, 3)')}({x})[0]"
            if hole == "mha":
                return f"self.{self._attribute('m', f'nn.MultiheadAttention({v.shape[-1]}, 1)')}({x}, {x}, {x})[0]"
            if v.dim() != rank:
                raise _Misfit
            if hole == "pool":
                return rng.choice([f"F.max_pool2d({x}, 2)", f"F.avg_pool2d({x}, 2)", f"F.adaptive_avg_pool2d({x}, 1)"])
            arguments = rng.choice(["1", "2, padding=1", "3, padding=1", "2, stride=2", "3, padding=2, dilation=2"])
            made = f"nn.Conv{rank - 2}d({v.shape[1]}, {rng.randint(1, 3)}, {arguments})"
            return f"self.{self._attribute('m', made)}({x})"
        raise ValueError(f"unknown hole {hole}")

    def _reshaped(self, first: str, value: Any) -> str:
        sizes = list(value.shape) if isinstance(value, Tensor) else []
        choices = ["-1", f"{first}.shape[0], -1", f"-1, {first}.shape[-1]", "-1, 2", "2, -1", "1, -1", f"{first}.shape"]
        if sizes:
            choices.append(", ".join(map(str, sizes[::-1])))
            choices.append(str(math.prod(sizes)))
        return self._rng.choice(choices)

    def _outputs(self) -> list[str]:
        world = self._worlds[0]
        names = [n for n, v in world.items() if isinstance(v, Tensor) and n[0] in "ax"]
        made = [n for n in names if n[0] == "x"] or names
        count = self._rng.choice([1, 2, 2, 3, 4, 6])
        chosen = [made[-1], *(self._rng.choice(made[-12:]) for _ in range(count - 1))]
        if self._rng.random() < 0.15:
            chosen.append(self._one(names))
        chosen = chosen if self._rng.random() < 0.1 else list(dict.fromkeys(chosen))
        extra = self._some(
            ["", "scalar", "{'k': %s}", "None", "(%s, [%s])", "size", "%s.shape[0]"], [12, 1, 1, 0.5, 1, 1, 1]
        )
        if extra:
            chosen.append(extra.replace("%s", self._one(names)))
        return chosen


def _inputs_source(inputs: list[tuple[str, str]]) -> str:
    return "\n".join(["def inputs(n):", *(f"    {name} = {made}" for name, made in inputs), "    return None"])


def _error(program: Program) -> str:
    """What eager raises, or nothing."""
    try:
        for precise in (False, True):
            if precise and program.draws():
                continue
            calls = run(load(program.source(), wide=precise), wide=precise)
            if calls[-1].error:
                return calls[-1].message or calls[-1].error
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error) or "no program"
    return ""


def _related(first: Tensor, other: Tensor, relation: str) -> bool:
    if relation == "=":
        return first.shape == other.shape
    pairs = zip(reversed(first.shape), reversed(other.shape), strict=False)
    return all(a == b or a == 1 or b == 1 for a, b in pairs)


def _plain(value: Tensor) -> bool:
    if value.numel() > _LARGEST or value.dim() > 6:
        return False
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(value.detach().abs().max() < _MAGNITUDE)
