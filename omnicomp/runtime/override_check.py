"""One call of an override compared with its reference, on the arguments of that call; forward and backward.

The judge is the same as for subgraphs (`omnicomp.analysis.accuracy`): the reference is computed in the dtypes of the
call and in a higher precision, and the override may be some times as far from the second as the first is.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp import records
from omnicomp._torch.autograd.call_hooks import widened
from omnicomp._torch.dynamo.control_flow import CONTROL_FLOW
from omnicomp._torch.inductor.failures import kind_of
from omnicomp.analysis.accuracy import Judged, copy_of, judge
from omnicomp.analysis.random_state import generator_states
from omnicomp.errors import first_line
from omnicomp.lowerings.overrides.declaration import Function, Override

_NUDGE: Final = 2.0  # roundings


@records.dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of a comparison."""

    state: str  # `right`, `wrong`, or `unknown` if the two could not be compared
    detail: str  # the errors, or why they could not be compared
    needed: str = ""  # the error that would have been accepted, if it is wrong
    raised: bool = False  # whether it is wrong as it raised where the reference did not
    results: Any = None  # what the override returned, or what the reference did if the override is wrong


def devices_of(values: Any) -> list[torch.device]:
    """The devices of the tensors among some values, each once."""
    return list(dict.fromkeys(leaf.device for leaf in tree_leaves(values) if isinstance(leaf, Tensor)))


def try_forward(
    item: Override,
    truth: Function,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precision: torch.dtype,
) -> Trial:
    """Call an override, and compare what it returns and writes with its reference.

    If it is wrong, the arguments that it changed hold the values of the reference.

    Raises:
        Exception: what the override itself raises.
    """
    smaller = _excerpt(item, args, kwargs)
    if smaller is not None:
        results = call(*args, **kwargs)
        found = try_forward(dataclasses.replace(item, excerpt=None), truth, call, smaller, {}, precision)
        detail = f"{found.detail}; of an excerpt"
        if found.state == "wrong":
            results = _like(truth(*args, **kwargs), results)
        return dataclasses.replace(found, detail=detail, results=results)
    changed = [name for name in item.mutates if isinstance(_named(item, name, args, kwargs), Tensor)]
    try:
        own = _copies(changed, args, kwargs)
        wide = _copies(None, args, kwargs, precision)
        nudged = _copies(None, args, kwargs, precision) if changed else wide
    except Exception as error:  # noqa: BLE001 - there may be no memory for copies; becomes the verdict
        return Trial(state="unknown", detail=_not_compared(error), results=call(*args, **kwargs))
    results = call(*args, **kwargs)
    states = generator_states(devices_of((args, kwargs)))
    try:
        expected = truth(*own[0], **own[1])
        drew = states.changed()
        with widened(precision):
            exact = truth(*wide[0], **wide[1])
        found, mine, true = (
            [*_results(value), *(_named(item, name, *given) for name in changed)]
            for value, given in ((results, (args, kwargs)), (expected, own), (exact, wide))
        )
        whole = _whole(item, args, kwargs, results, len(mine)) if item.form == "pattern" else found
        if drew or whole is None:
            why = "the reference draws random numbers" if drew else "it does more than to call its operator"
            return Trial(state="unknown", detail=why, results=results)
        if len(whole) == len(mine):
            judged = judge(whole, mine, _with_doubts(whole, mine, true, truth, nudged, precision))
        else:
            judged = Judged(error=float("inf"), own=0.0, allowed=0.0, worst=0)
    except CONTROL_FLOW:
        raise
    except Exception as error:  # noqa: BLE001 - becomes the verdict
        return Trial(state="unknown", detail=_not_compared(error), results=results)
    finally:
        states.restore()
    if judged.worst is None:
        return Trial(state="right", detail=_errors(judged), results=results)
    for name in changed:
        _named(item, name, args, kwargs).copy_(_named(item, name, *own))
    return Trial(
        state="wrong",
        detail=f"result {judged.worst}: {_errors(judged)}",
        needed=f"at most {judged.allowed:.1e}",
        results=_like(expected, results),
    )


def _excerpt(item: Override, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The arguments of a smaller call that is compared instead, if the override makes one."""
    return None if item.excerpt is None else item.excerpt(*args, **kwargs)


def _not_compared(error: Exception) -> str:
    return f"the reference could not be computed: {first_line(error)}"


def try_backward(
    names: Sequence[str],
    item: Override,
    truth: Function,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precision: torch.dtype,
) -> Trial:
    """Compare the gradients of an override with those of its reference, for random gradients of the results.

    Args:
        names: the arguments that are differentiated; `*` for all that the override has gradients for.
        item: the override; it changes no argument.
        truth: what it should compute, with the same arguments.
        call: its operator.
        args: the operator's arguments.
        kwargs: likewise.
        precision: the dtype of the truth.
    """
    smaller = _excerpt(item, args, kwargs)
    if smaller is not None:
        args, kwargs = smaller, {}
    states = generator_states(devices_of((args, kwargs)))
    try:
        try:
            if "*" in names:
                schema = [argument.name for argument in item.operators[0]._schema.arguments]
                names = [name for name in schema if _is_float(_named(item, name, args, kwargs))]
                given = _gradients(names, item, call, args, kwargs, None)
                names = [name for name, gradient in zip(names, given, strict=True) if gradient is not None]
            found = _gradients(names, item, call, args, kwargs, None)
        except CONTROL_FLOW:
            raise
        except Exception as error:
            if kind_of(error) != "graph":  # there was no memory, or no time
                raise
            _gradients(names, item, truth, args, kwargs, None)  # if this raises, nothing is known
            return Trial(state="wrong", detail=f"its backward raised {first_line(error)}", raised=True)
        mine = _gradients(names, item, truth, args, kwargs, None)
        with widened(precision):
            true = _gradients(names, item, truth, args, kwargs, precision)
    except CONTROL_FLOW:
        raise
    except Exception as error:  # noqa: BLE001 - becomes the verdict
        return Trial(state="unknown", detail=f"a gradient could not be computed: {first_line(error)}")
    finally:
        states.restore()
    # Without a gradient, the program gets none or zeros.
    judged = judge(*(list(map(_or_zeros, each, mine, true)) for each in (found, mine, true)))
    if judged.worst is None:
        return Trial(state="right", detail=_errors(judged))
    detail = f"gradient of {names[judged.worst]}: {_errors(judged)}"
    return Trial(state="wrong", detail=detail, needed=f"at most {judged.allowed:.1e}")


def _gradients(
    names: Sequence[str],
    item: Override,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precision: torch.dtype | None,
) -> list[Tensor | None]:
    args, kwargs = tree_map(lambda value: copy_of(value, precision), (args, kwargs))
    leaves = [_named(item, name, args, kwargs).requires_grad_() for name in names]
    with torch.enable_grad():
        results = [value for value in _results(function(*args, **kwargs)) if _differentiable(value)]
        # The same numbers for all three, whatever the dtype: they are drawn on the CPU.
        draw = torch.Generator().manual_seed(0)
        tangents = [torch.randn(r.shape, generator=draw).to(r.device, r.dtype) for r in results]
        return list(torch.autograd.grad(results, leaves, tangents, allow_unused=True))


def _or_zeros(value: Tensor | None, *others: Tensor | None) -> Tensor | None:
    like = next((other for other in others if other is not None), None)
    return torch.zeros_like(like) if value is None and like is not None else value


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _whole(item: Override, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any, count: int) -> list[Any] | None:
    """What the function of a pattern's override returns; None if that is not what its operator does."""
    found, own = _results(item.function(*args, **kwargs)), _results(results)
    same = len(found) == len(own) == count and all(map(_same, found, own))
    return found if same else None


def _same(left: Any, right: Any) -> bool:
    return isinstance(left, Tensor) and left.shape == right.shape and left.dtype == right.dtype


def _named(item: Override, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of an argument of the operator."""
    if name in kwargs:
        return kwargs[name]
    names = [argument.name for argument in item.operators[0]._schema.arguments]
    position = names.index(name)
    return args[position] if position < len(args) else None


def _copies(
    changed: Sequence[str] | None, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the arguments; the arguments themselves if none of them is changed."""
    if changed is not None and not changed:
        return args, kwargs
    return tree_map(lambda value: copy_of(value, dtype), (args, kwargs))


def _results(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [] if value is None else [value]


def _with_doubts(
    found: list[Any],
    mine: list[Any],
    true: list[Any],
    truth: Function,
    wide: tuple[tuple[Any, ...], dict[str, Any]],
    precision: torch.dtype,
) -> list[Any]:
    """The precise results, with integers masked that rounding could have changed.

    Of equal elements an index may name any. Whole numbers that differ are compared with those for inputs that are
    changed by some roundings, in both directions; where these differ as well, nothing is certain.
    """
    doubtful = [
        i
        for i, (got, own) in enumerate(zip(found, mine, strict=True))
        if isinstance(got, Tensor) and isinstance(own, Tensor) and not got.is_floating_point() and not got.is_complex()
        if got.shape == own.shape and not torch.equal(got, own)
    ]
    if not doubtful:
        return true
    draw, true = torch.Generator().manual_seed(0), list(true)
    for _ in range(4):
        noise: dict[int, Tensor] = {}
        for sign in (1.0, -1.0):

            def nudge(value: Any, sign: float = sign, noise: dict[int, Tensor] = noise) -> Any:
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    return value
                if id(value) not in noise:
                    noise[id(value)] = torch.randn(value.shape, generator=draw).to(value.device, value.dtype)
                size = value[value.isfinite()].abs().amax() if value.isfinite().any() else value.new_zeros(())
                return value + sign * _NUDGE * torch.finfo(torch.float32).eps * size * noise[id(value)]

            args, kwargs = tree_map(nudge, wide)
            with widened(precision):
                others = _results(truth(*args, **kwargs))
            for i in doubtful:
                own, exact = mine[i], true[i].to(mine[i].dtype)
                moved = (exact == own) & (others[i].to(own.dtype) != own)
                other = ~own if own.dtype == torch.bool else own + 1
                true[i] = torch.where(moved, other, exact)
    return true


def _like(expected: Any, results: Any) -> Any:
    """The reference's results in the layout of the override's, which the code behind it was built for."""
    own = _results(results)
    made = [
        torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=old.device).copy_(new)
        if isinstance(new, Tensor) and isinstance(old, Tensor) and _same(new, old) and 0 not in old.stride()
        else new
        for new, old in zip(_results(expected), [*own, *[None] * len(_results(expected))], strict=False)
    ]
    return type(expected)(made) if isinstance(expected, (tuple, list)) else made[0] if made else None


def _errors(judged: Judged) -> str:
    return f"error {judged.error:.1e}, the reference's {judged.own:.1e}"
