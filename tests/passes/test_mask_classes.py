"""Classes of masks by their values: whatever is said of random masks is so, and the usual ones are recognised."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnicomp.passes.mask_classes import GENERAL, MaskClass, classified, is_of, statistics, usual_name

ALL = frozenset(("full", "causal", "band", "prefix", "first", "rows"))


def band(queries: int, keys: int, left: int | None = None, right: int | None = None) -> torch.Tensor:
    q, k = torch.arange(queries)[:, None], torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left is not None:
        seen = seen & (k >= q - left)
    if right is not None:
        seen = seen & (k <= q + right)
    return seen[None, None]


def class_of(mask: torch.Tensor, other: bool | None = None) -> MaskClass:
    return classified(statistics(mask, None if other is None else torch.tensor(other)).tolist())


def mask_of(known: MaskClass, queries: int, keys: int) -> torch.Tensor:
    right = 0 if known.kind == "causal" else known.right
    seen = band(queries, keys, known.left, right)
    if known.length is not None:
        seen = seen | (torch.arange(keys) < known.length)
    return seen


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    queries, keys = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    offsets = st.sampled_from([None, -1, 0, 1, 2, 3])
    mask = band(queries, keys, draw(offsets), draw(offsets)).clone()
    if draw(st.booleans()):
        mask[..., : draw(st.integers(0, 4))] = True
    mask = mask.expand(draw(st.integers(1, 2)), draw(st.integers(1, 2)), queries, keys)
    change = draw(st.sampled_from(["none", "none", "keys", "element", "noise"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    if change == "keys":
        mask = mask & (torch.rand(mask.shape[0], 1, 1, keys, generator=generator) > 0.3)
    elif change == "noise":
        mask = mask ^ (torch.rand(mask.shape, generator=generator) > 0.7)
    elif change == "element":
        mask = mask.clone()
        mask.view(-1)[draw(st.integers(0, mask.numel() - 1))].logical_not_()
    return mask


@settings(max_examples=400)
@given(masks(), st.integers(0, 2), st.integers(0, 2))
def test_what_is_said_of_a_mask_is_so(mask: torch.Tensor, left: int, right: int) -> None:
    found = class_of(mask)
    rows = bool(mask.any(-1).all())
    assert (found.kind == "general") == (not rows)
    if found.is_known:
        assert torch.equal(mask, mask_of(found, *mask.shape[-2:]).expand_as(mask))
        assert bool(is_of((mask, (), ()), found))
    for kind in ("first", "rows"):
        weak = found.among(frozenset((kind,)))
        assert weak == GENERAL or bool((mask[..., 0] if kind == "first" else mask.any(-1)).all())
    assert class_of(mask, other=True).kind in ("general", "rows", "first")
    for wanted in (
        MaskClass(kind="full"),
        MaskClass(kind="causal"),
        MaskClass(kind="band", left=left, right=right),
        MaskClass(kind="prefix", right=0, length=left),
    ):
        same = torch.equal(mask, mask_of(wanted, *mask.shape[-2:]).expand_as(mask))
        added = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        for parts in ((mask, (), ()), (None, (added,), (-1e8,)), (mask, (added, 0 * added), (-1e8, -1e8))):
            assert bool(is_of(parts, wanted)) == same
        assert not is_of((None, (added + 1,), (-1e8,)), wanted), "it adds something"
        assert not is_of((mask, (added + 1,), (-1e8,)), wanted)


@pytest.mark.parametrize(
    ("mask", "text", "name"),
    [
        (band(8, 8), "full", ""),
        (band(8, 8, None, 0), "causal", "causal"),
        (band(5, 8, None, 3), "causal, offset 3", "causal, offset 3"),
        (band(8, 8, 2, 0), "sliding window of 3", "sliding window of 3"),
        (band(8, 8, 1, 2), "window of 1 before and 2 after", "window of 1 before and 2 after"),
        (band(8, 8, None, 0) | (torch.arange(8) < 3), "prefix of 3", ""),
        ((torch.arange(8) < torch.tensor([[8], [5]]))[:, None, None], "the first key is seen", "right padding"),
        ((torch.arange(8) >= torch.tensor([[0], [5]]))[:, None, None], "no row is empty", "left padding"),
    ],
)
def test_the_usual_masks(mask: torch.Tensor, text: str, name: str) -> None:
    assert str(class_of(mask)) == text
    assert usual_name(mask) == name


def test_masks_that_only_data_tells_have_names() -> None:
    causal, left = band(8, 8, None, 0), torch.arange(8) >= torch.tensor([[0], [5]])
    assert usual_name(causal & left[:, None, None]) == "causal and left padding"
    assert usual_name(causal & left.flip(1)[:, None, None]) == "causal and right padding"
    assert usual_name(band(8, 8, 2, 0) & left[:, None, None]) == "sliding window of 3 and left padding"
    right = left.flip(1)[:, None, None]
    assert usual_name(band(8, 8, 2, 2) & right) == "window of 2 before and 2 after and right padding"
    assert usual_name(causal & torch.tensor([[0], [1]], dtype=torch.bool)[:, None, None]) == "causal and padding"
    documents = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    same = (documents[:, None] == documents)[None, None]
    assert (usual_name(same), usual_name(same & causal)) == ("documents", "causal documents")
    assert usual_name(same & (documents < 2)[:, None] & (documents < 2)) == "documents and padding"
    assert usual_name(torch.eye(8, dtype=torch.bool)[None, None] | (torch.arange(8) == 3)) == ""


def test_a_class_counts_as_the_most_that_is_accepted() -> None:
    window = MaskClass(kind="band", left=2, right=0)
    assert window.among(ALL) is window
    assert window.among(frozenset(("full", "first", "rows"))).kind == "rows"
    assert MaskClass(kind="causal").among(frozenset(("full", "first"))).kind == "first"
    assert MaskClass(kind="causal").among(frozenset(("full",))) == GENERAL


@pytest.mark.parametrize("shape", [(2, 1, 0, 4), (2, 1, 4, 0), (0, 1, 4, 4)])
def test_a_mask_without_elements_is_of_no_class(shape: tuple[int, ...]) -> None:
    mask = torch.ones(shape, dtype=torch.bool)
    assert class_of(mask) == GENERAL
    assert not is_of((mask, (), ()), MaskClass(kind="causal"))
