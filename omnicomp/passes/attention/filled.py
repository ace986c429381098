"""Attention over a cache that is filled in part: keys and values are read up to the last key that any query sees.

A step of one token against a cache of fixed size has a mask that hides what was not written yet, and a kernel with a
dense mask reads all of it. How many keys are seen is a number that the mask shows in each call: an unbacked symbol of
the compiled graph, so that one graph serves all positions.
"""

import dataclasses
from typing import Any, Final

import torch

from omnicomp._torch.autograd import sdpa
from omnicomp._torch.autograd.attention import is_static
from omnicomp._torch.symbols import read_number, unbound
from omnicomp.passes.attention.form import NO_WEIGHT, Form
from omnicomp.passes.attention.masking import Masking, hides, mask_key
from omnicomp.passes.attention.sdpa import Parts, axes_of_step, lowest_of
from omnicomp.passes.attention.session import Attempt, Session
from omnicomp.passes.attention.site import Site, axes_in, uncast
from omnicomp.passes.attention.terms import Apply, Axis, Index, Term, flat
from omnicomp.passes.kernels import measured

# Keys for each query; where there are about as many queries as keys, few keys are hidden from all of them.
_KEYS_OF_A_QUERY: Final = 4
# Elements of keys and values. One core reads them in some 50 microseconds, and finding the last key takes about 5.
_MANY_ELEMENTS: Final = 1 << 17
# Elements of keys and values for each element of the mask, which is read once more.
_ELEMENTS_OF_A_MASK: Final = 8


def last_key(mask: torch.Tensor, lowest: float) -> torch.Tensor:
    """How many keys have to be read, on the device: up to the last one that a query sees.

    If there is a row in which no key is seen, these are all keys, since such a row may share all values.

    Args:
        mask: [B, H, Q, K], bool (False hides) or added to the scores; dimensions but the last may be of size 1.
        lowest: a number that hides a key if it, or a lower one, is added.

    Returns:
        1 to K, without dimensions.
    """
    keys = mask.shape[-1]
    if mask.dtype is torch.bool:
        seen = clear = mask
    else:
        # A key whose mask is not a number is seen. Beside a key that is clear, one that is hidden has no weight.
        seen, clear = torch.logical_not(mask <= lowest), mask >= -NO_WEIGHT
    last = torch.where(seen, torch.arange(1, keys + 1, device=mask.device), 0).amax()
    return torch.where(clear.any(-1).all(), last, keys)


def filled_keys(mask: torch.Tensor, lowest: float) -> int:
    """The same as a number, for which the host waits."""
    return read_number(last_key(mask, lowest), least=1, most=mask.shape[-1])


LAST_KEY: Final = sdpa.define("last_key(Tensor mask, float lowest) -> Tensor", last_key)
FILLED_KEYS: Final = sdpa.define("filled_keys(Tensor mask, float lowest) -> SymInt", filled_keys)


def may_be_filled(site: Site, form: Form, masking: Masking, session: Session) -> bool:
    """Whether data may hide keys from all queries, and looking for the last one costs little beside reading them all.

    On a GPU the number of keys stays on the device, which takes a kernel of its own (`few_queries`).
    """
    old, keys = site.fake(), set(flat(site.keys))
    shown: set[Axis] = set().union(*map(axes_of_step, form.mask))
    axes = flat((*site.batch, *site.queries, *site.keys))
    if old.requires_grad or not shown & keys or not (on_host(site) or measured(session.context.device)):
        return False
    if not all(is_static(axis.size) for axis in axes):
        return False
    of_data = masking.mask is not None and masking.mask.depends_on_data
    if masking.known is not None or not (of_data or any(hides(step, session.reader) for step in masking.biases)):
        return False
    few = _count(site.queries) * _KEYS_OF_A_QUERY <= _count(site.keys)
    elements = site.key.value.fake.numel() + site.value.value.fake.numel()
    return few and elements >= max(_MANY_ELEMENTS, _ELEMENTS_OF_A_MASK * _count(tuple(shown)))


def on_host(site: Site) -> bool:
    """Whether the host knows the number of keys without waiting for a device."""
    return site.fake().device.type == "cpu"


def is_prefix(site: Site, masking: Masking) -> bool:
    """Proven: what data hides begins at one key for all queries, and nothing else is hidden."""
    conjuncts = masking.mask.conjuncts if masking.mask is not None else ()
    return len(conjuncts) == 1 and _ends(conjuncts[0].term, flat(site.keys))


def _ends(term: Term, keys: tuple[Axis, ...], *, negated: bool = False) -> bool:
    """Whether a condition is that the key's index is at most a number which no index changes."""
    if not isinstance(term, Apply):
        return False
    if term.op == "not":
        return _ends(term.args[0], keys, negated=not negated)
    upper = ("gt", "ge") if negated else ("lt", "le")
    if term.op in ("gt", "ge", "lt", "le"):
        index, bound = term.args if term.op in upper else term.args[::-1]
        index = uncast(index)
        plain = isinstance(index, Index) and index.step == 1 and index.position.flat() == keys
        return plain and not flat(tuple(axes_in(bound)))
    return False


def cut(made: Parts, site: Site, form: Form, attempt: Attempt) -> Parts:
    """Keys, values and the mask up to the last key that is seen.

    The number is found once for all sites that share a mask.
    """
    keys, call = keys_seen(FILLED_KEYS, made, site, form, attempt), attempt.call
    key, value = (call(torch.narrow, (each, 2, 0, keys)) for each in (made.key, made.value))
    return dataclasses.replace(made, key=key, value=value, mask=call(torch.narrow, (made.mask, 3, 0, keys)))


def keys_seen(operator: Any, made: Parts, site: Site, form: Form, attempt: Attempt) -> Any:
    """How many keys are to be read, by one of the two operators; once for all sites that share a mask."""
    shared, name = attempt.session.shared, (operator, mask_key(site, form), site.dtype)
    if name not in shared:
        with unbound(site.fake()):
            shared[name] = attempt.call(operator, (made.mask, lowest_of(site, form, attempt.session.reader)))
    return shared[name]


def _count(axes: tuple[Axis, ...]) -> int:
    total = 1
    for axis in flat(axes):
        total *= axis.size
    return total
