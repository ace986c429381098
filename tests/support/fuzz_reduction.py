"""What is left of a program that fails when everything is taken out that it fails without."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator

import torch
from fuzz_checks import load, run
from fuzz_programs import Program, Statement, parameters
from torch import Tensor

_ALIAS = re.compile(r"(x\d+) = ([ax]\w+)")
_NAME = re.compile(r"\b([axpbm]\d+(?:_\d+)?)\b")


def reduce(program: Program, fails: Callable[[Program], bool], *, seconds: float = 60.0) -> Program:
    """The smallest program found that fails in the same way.

    Args:
        program: one that fails.
        fails: whether one that eager runs fails in that way.
        seconds: of processor time, to stop after with what there is.
    """
    end = time.process_time() + seconds
    seen = {program.source()}
    steps = (_slices, _calls, _options, _outputs, _statements, _givens, _aliases, _unused, _lines, _inputs, _sizes)
    progress = True
    while progress and time.process_time() < end:
        progress = False
        for step in steps:
            candidates = step(program)
            for candidate in candidates:
                if time.process_time() > end:
                    return program
                key = candidate.source() + repr(candidate.options)
                if key in seen:
                    continue
                seen.add(key)
                if _runs(candidate) and fails(candidate):
                    program, progress = candidate, True
                    break
            else:
                continue
            break
    return program


def _runs(candidate: Program) -> bool:
    """Whether eager runs it, but for the operator that raises."""
    try:
        return not run(load(candidate.source().replace("torch.ops.fuzz.refuse", "torch.sin")))[-1].error
    except Exception:
        return False


def _calls(program: Program) -> Iterator[Program]:
    sizes = program.sizes
    for i in range(len(sizes)):
        if len(sizes) > 1:
            yield dataclasses.replace(program, sizes=(*sizes[:i], *sizes[i + 1 :]))
    if len(set(sizes)) > 1:
        yield dataclasses.replace(program, sizes=(sizes[0],) * len(sizes))
    if program.backward:
        yield dataclasses.replace(program, backward=False)
    if program.dynamic is not None:
        yield dataclasses.replace(program, dynamic=None)


def _options(program: Program) -> Iterator[Program]:
    if program.options != {"lowerings": ["eager"]}:
        yield dataclasses.replace(program, options={"lowerings": ["eager"]})
    for key in program.options:
        yield dataclasses.replace(program, options={k: v for k, v in program.options.items() if k != key})


def _outputs(program: Program) -> Iterator[Program]:
    for output in program.outputs if len(program.outputs) > 1 else ():
        yield dataclasses.replace(program, outputs=(output,))
    for chunk in _chunks(len(program.outputs)):
        kept = tuple(o for i, o in enumerate(program.outputs) if i not in chunk)
        if kept:
            yield dataclasses.replace(program, outputs=kept)


def _statements(program: Program) -> Iterator[Program]:
    """Without some lines, and without the lines that use what they made."""
    for chunk in _chunks(len(program.statements)):
        kept: list[Statement] = []
        gone: set[str] = set()
        for i, statement in enumerate(program.statements):
            made, used = _made(statement.text), set(_NAME.findall(statement.text))
            if i in chunk:
                gone |= made
            elif (used - made) & gone:
                gone |= made
            else:
                kept.append(statement)
                gone -= made
        alive = set(parameters(program.arguments)) | {name for s in kept for name in _made(s.text)}
        outputs = tuple(o for o in program.outputs if not set(_NAME.findall(o)) - alive)
        if outputs:
            yield dataclasses.replace(program, statements=tuple(kept), outputs=outputs)
        plain = dataclasses.replace(
            program, statements=tuple(s for i, s in enumerate(program.statements) if i not in chunk)
        )
        yield plain


def _slices(program: Program) -> Iterator[Program]:
    """Only the lines that an output, or all of them, may need: which make or write to a name that these use."""
    for outputs in dict.fromkeys([program.outputs[:1], *((o,) for o in program.outputs), program.outputs]):
        live = set(_NAME.findall(" ".join(outputs)))
        kept: list[Statement] = []
        for statement in reversed(program.statements):
            names, made = set(_NAME.findall(statement.text)), _made(statement.text)
            if made & live or (not made and names & live):
                live |= names
                kept.insert(0, statement)
        yield dataclasses.replace(program, statements=tuple(kept), outputs=outputs)


def _made(text: str) -> set[str]:
    left, equals, _ = text.partition(" = ")
    return set(_NAME.findall(left)) if equals and "[" not in left and "." not in left else set()


def _chunks(count: int) -> Iterator[set[int]]:
    """Halves, quarters, … and single ones, last first."""
    size = count // 2
    while size >= 1:
        for start in range(count - size, -1, -size):
            yield set(range(start, start + size))
        size //= 2
    if count == 1:
        yield {0}


def _givens(program: Program) -> Iterator[Program]:
    """With an input in the place of what a line computes."""
    try:
        names = load(program.source())
        module = names["Program"]()
        world = {**names, "self": module}
        torch.manual_seed(0)
        arguments, _ = names["inputs"](program.sizes[0])
        world.update(zip(parameters(program.arguments), arguments, strict=True))
    except Exception:
        return
    for i, statement in enumerate(program.statements):
        text = statement.text if not statement.region else f"with {statement.region}:\n    {statement.text}"
        try:
            exec(text, world)
        except Exception:
            return
        made = sorted(_made(statement.text))
        given = {name: _like(world[name]) for name in made if isinstance(world.get(name), Tensor)}
        if not given or _ALIAS.fullmatch(statement.text):
            continue
        free = max([int(name[1:]) for name, _ in program.inputs if name[0] == "a"], default=0) + 1
        taken = {name: f"a{free + k}" for k, name in enumerate(given)}
        statements = [
            *program.statements[:i],
            *(Statement(f"{name} = {argument}") for name, argument in taken.items()),
            *program.statements[i + 1 :],
        ]
        yield dataclasses.replace(
            program,
            inputs=(*program.inputs, *((taken[name], made) for name, made in given.items())),
            arguments=(*program.arguments, *taken.values()),
            statements=tuple(statements),
        )


def _like(value: Tensor) -> str:
    names = {
        torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.complex64: "C64",
        torch.int32: "I32", torch.uint8: "U8", torch.complex128: "C64", torch.int16: "I32",
    }  # fmt: skip
    shape = ", ".join(map(str, value.shape))
    if value.dtype == torch.bool:
        return f"bools({shape})"
    dtype = f"{', ' if shape else ''}dtype={names[value.dtype]}" if value.dtype in names else ""
    if value.is_floating_point() or value.is_complex():
        return f"{'leaf' if value.requires_grad else 'normal'}({shape}{dtype})"
    return f"ints({shape}{dtype})"


def _aliases(program: Program) -> Iterator[Program]:
    """Without second names of a tensor."""
    for i, statement in enumerate(program.statements):
        alias = _ALIAS.fullmatch(statement.text)
        if alias:
            new, old = alias.groups()
            later = [
                dataclasses.replace(s, text=re.sub(rf"\b{new}\b", old, s.text)) for s in program.statements[i + 1 :]
            ]
            outputs = tuple(dict.fromkeys(re.sub(rf"\b{new}\b", old, o) for o in program.outputs))
            yield dataclasses.replace(program, statements=(*program.statements[:i], *later), outputs=outputs)


def _unused(program: Program) -> Iterator[Program]:
    text = " ".join([*(s.text for s in program.statements), *program.outputs])
    used = set(_NAME.findall(text))
    words = set(re.findall(r"\w+", text))
    for i, name in enumerate(parameters(program.arguments)):
        if name not in used and name not in words and len(program.arguments) > 1:
            yield dataclasses.replace(program, arguments=program.arguments[:i] + program.arguments[i + 1 :])
    needed = " ".join([*program.arguments, *(made for _, made in program.inputs)])
    kept = tuple((n, m) for n, m in program.inputs if re.search(rf"\b{n}\b", needed))
    if kept != program.inputs:
        yield dataclasses.replace(program, inputs=kept)
    for name, made in program.attributes:
        if name not in used:
            yield dataclasses.replace(
                program, attributes=tuple(other for other in program.attributes if other != (name, made))
            )
    for i, name in enumerate(parameters(program.arguments)):
        if program.arguments.index(program.arguments[i]) != i:
            statements = tuple(
                dataclasses.replace(s, text=re.sub(rf"\b{name}\b", program.arguments[i], s.text))
                for s in program.statements
            )
            outputs = tuple(re.sub(rf"\b{name}\b", program.arguments[i], o) for o in program.outputs)
            yield dataclasses.replace(
                program,
                statements=statements,
                outputs=outputs,
                arguments=program.arguments[:i] + program.arguments[i + 1 :],
            )


def _lines(program: Program) -> Iterator[Program]:
    """With simpler lines: outside of their `with`, and a plain copy in the place of what they compute."""
    for i, statement in enumerate(program.statements):
        others = [Statement(statement.text)] if statement.region else []
        made = sorted(_made(statement.text))
        if len(made) == 1:
            right = statement.text.partition(" = ")[2]
            for name in dict.fromkeys(_NAME.findall(right)):
                for simple in (name, f"{name} + 1"):
                    if len(right) > len(simple) and name[0] in "ax":
                        others.append(Statement(f"{made[0]} = {simple}", statement.region))
        for other in others:
            yield dataclasses.replace(
                program, statements=(*program.statements[:i], other, *program.statements[i + 1 :])
            )


def _inputs(program: Program) -> Iterator[Program]:
    """With inputs of plainer dtypes, and no gradient."""
    for i, (name, made) in enumerate(program.inputs):
        others = [re.sub(r",? ?dtype=(F16|BF16|F64|C64|I32|U8)", "", made), made.replace("leaf(", "normal(")]
        if name[0] == "a" and not made.startswith(("leaf", "normal", "ints", "bools")):
            others.append("normal(n, 4)")
        for other in others:
            if other != made:
                yield dataclasses.replace(
                    program, inputs=(*program.inputs[:i], (name, other), *program.inputs[i + 1 :])
                )


def _sizes(program: Program) -> Iterator[Program]:
    """With smaller sizes, in one input or wherever the size occurs."""
    made = [*program.inputs, *program.attributes]
    numbers = sorted({word for _, m in made for word in re.findall(r"(?<=[(\s])(n|\d+)(?=[,)])", m)})
    for number in numbers:
        for smaller in ("1", "2", "3"):
            if number != "n" and int(number) <= int(smaller):
                continue

            def shrink(text: str, number: str = number, smaller: str = smaller) -> str:
                return re.sub(rf"(?<=[(\s]){number}(?=[,)])", smaller, text)

            yield dataclasses.replace(
                program,
                inputs=tuple((n, shrink(m)) if n != "size" else (n, m) for n, m in program.inputs),
                attributes=tuple((n, shrink(m)) for n, m in program.attributes),
            )
            for i, (name, m) in enumerate(program.inputs):
                if shrink(m) != m:
                    yield dataclasses.replace(
                        program, inputs=(*program.inputs[:i], (name, shrink(m)), *program.inputs[i + 1 :])
                    )
    sizes = program.sizes
    if max(sizes) > 2:
        yield dataclasses.replace(program, sizes=tuple(max(1, size - 1) for size in sizes))
