"""Classes of masks by their values: whatever is said of random masks is so, and the usual ones are recognised."""

from collections.abc import Iterator
from typing import Any

import interpreted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnicomp.passes import mask_classes
from omnicomp.passes.mask_classes import (
    GENERAL,
    MaskClass,
    MaskParts,
    classified,
    is_of,
    joined,
    reduced,
    shown,
    statistics,
    usual_name,
)

ALL = frozenset(("full", "causal", "band", "prefix", "runs", "first", "rows"))


def band(queries: int, keys: int, left: int | None = None, right: int | None = None) -> torch.Tensor:
    q, k = torch.arange(queries)[:, None], torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left is not None:
        seen = seen & (k >= q - left)
    if right is not None:
        seen = seen & (k <= q + right)
    return seen[None, None]


def class_of(mask: torch.Tensor, other: bool | None = None) -> MaskClass:
    return classified(joined(statistics(mask, None if other is None else torch.tensor(other))))


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


def runs(first: torch.Tensor, last: torch.Tensor, keys: int) -> torch.Tensor:
    """A mask of which each row is a run of keys."""
    k = torch.arange(keys)
    return (k >= first[..., None]) & (k <= last[..., None])


def documents_of(length: int, size: int) -> torch.Tensor:
    numbers = torch.arange(size) // length
    return (numbers[:, None] == numbers)[None, None]


def test_short_runs_of_keys_leave_out_blocks() -> None:
    causal = band(640, 640, None, 0)
    packed = documents_of(150, 640)
    for mask in (packed, packed & causal, packed.roll(1, -2)[..., 1:, :]):
        assert class_of(mask) == MaskClass(kind="runs")
        assert class_of(mask, other=True) == MaskClass(kind="rows")
    assert str(class_of(packed)) == "short runs of keys"
    assert class_of(documents_of(400, 640)).kind == "rows", "what is hidden is less than half"
    assert class_of(documents_of(150, 640).roll(1, -1)).kind == "rows", "one row has two runs"
    start = torch.randint(0, 600, (1, 1, 640), generator=torch.Generator().manual_seed(0))
    assert class_of(runs(start, start + 9, 640)).kind == "rows", "rows beside each other have nothing in common"


def test_short_runs_count_as_what_is_known_of_the_first_key() -> None:
    packed, prefix = documents_of(150, 640), (torch.arange(640) < 200).expand(1, 1, 640, 640) & band(640, 640, None, 0)
    assert class_of(prefix).among(ALL) == class_of(packed).among(ALL) == MaskClass(kind="runs")
    weak = frozenset(("full", "first"))
    assert (class_of(prefix).among(weak).kind, class_of(packed).among(weak)) == ("first", GENERAL)
    assert class_of(packed).among(frozenset(("rows",))).kind == "rows"


@pytest.mark.parametrize("shape", [(2, 1, 0, 4), (2, 1, 4, 0), (0, 1, 4, 4)])
def test_a_mask_without_elements_is_of_no_class(shape: tuple[int, ...]) -> None:
    mask = torch.ones(shape, dtype=torch.bool)
    assert class_of(mask) == GENERAL
    assert not is_of((mask, (), ()), MaskClass(kind="causal"))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel takes tensors of this device: Triton's interpreter runs it on the CPU."""
    device = interpreted.device()
    monkeypatch.setattr(mask_classes, "usable", lambda tensor: tensor.device.type == device)
    yield device
    assert mask_classes.unusable() is None


@st.composite
def parts_of_masks(draw: st.DrawFn) -> MaskParts:
    """A mask as a bool, as numbers, or as both; of any strides and dtype, with numbers that are none."""
    visible = draw(masks())
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    hides = -65504.0 if dtype is torch.float16 else -1e8
    low = draw(st.sampled_from([-torch.inf, torch.finfo(dtype).min]))
    kind = draw(st.sampled_from(["keep", "added", "both", "outer"]))
    added = torch.where(visible, 0.0, low).to(dtype)
    if draw(st.integers(0, 3)) == 0:
        number = draw(st.sampled_from([1.0, -999.0, -1001.0, -2e4, -torch.inf, torch.nan]))
        added = added.clone()
        added.view(-1)[draw(st.integers(0, added.numel() - 1))] = number

    def laid(tensor: torch.Tensor) -> torch.Tensor:
        way = draw(st.sampled_from(["as it is", "dense", "transposed", "a part"]))
        if way == "transposed":
            return tensor.mT.contiguous().mT
        if way == "a part":
            return torch.nn.functional.pad(tensor, (1, 2, 1, 0))[..., 1:, 1:-2]
        return tensor.contiguous() if way == "dense" else tensor

    if kind == "keep":
        return laid(visible), (), ()
    if kind == "added":
        return None, (laid(added),), (hides,)
    keep = visible if kind == "both" else visible[:1, :, :1]
    return laid(keep), (laid(added),), (hides,)


def same(parts: MaskParts, device: str) -> None:
    keep, added, hides = parts
    given = None if keep is None else keep.to(device), [tensor.to(device) for tensor in added], hides
    # A copy on a device has no rows that are only repeated.
    found, expected = joined(reduced(given).cpu()), joined(statistics(*shown(given)).cpu())
    assert classified(found) == classified(expected)
    if expected[8] > 1:  # queries; torch looks at less for one
        assert found[:9] == expected[:9]
        assert found[12] == expected[12]


@given(parts_of_masks())
def test_the_kernel_finds_what_torch_finds(kernel: str, parts: MaskParts) -> None:
    same(parts, kernel)


@pytest.mark.parametrize(("rows", "keys"), [(1, 4097), (5, 2048), (70, 900)])
def test_the_kernel_finds_it_in_many_blocks_and_programs(
    kernel: str, rows: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_classes, "_PROGRAMS", 3)
    numbers = torch.arange(rows)[:, None] * 5 // rows, torch.arange(keys) * 5 // keys
    documents = (numbers[0] == numbers[1])[None, None]
    assert class_of(documents).kind == ("runs" if rows > 1 else "first")
    for mask in (band(rows, keys, None, 0), band(rows, keys, 3, keys), band(rows, keys), documents):
        same((mask, (), ()), kernel)
        changed = mask.clone()
        changed[..., -1, -1].logical_not_()
        same((None, (torch.zeros(changed.shape).masked_fill(~changed, -1e9),), (-1e8,)), kernel)
    padding = (torch.arange(keys) < torch.tensor([keys, 1 + keys // 2])[:, None])[:, None, None]
    same((padding.expand(-1, 3, rows, -1), (), ()), kernel)


@pytest.mark.parametrize("alike", [True, False], ids=["of the same sizes", "of other sizes and places"])
def test_the_kernel_finds_it_in_the_next_masks(kernel: str, alike: bool) -> None:
    for step in range(4):
        size = 64 if alike else 64 + step
        mask = band(size, size, None, step)
        added = torch.zeros(size * size + 1, device=kernel)[0 if alike else step % 2 :][: size * size].view(mask.shape)
        added.masked_fill_(~mask.to(kernel), -1e9)
        assert classified(joined(reduced((None, (added,), (-1e8,))).cpu())) == class_of(mask)
        assert classified(joined(reduced((mask.to(kernel), (), ())).cpu())) == class_of(mask)


def test_a_kernel_that_fails_gives_way_to_torch_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*parts: Any) -> torch.Tensor:
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(mask_classes, "usable", lambda tensor: True)
    monkeypatch.setattr(mask_classes, "_launched", broken)
    monkeypatch.setattr(mask_classes, "_unusable", [])
    for _ in range(2):
        assert classified(joined(reduced((band(4, 4, None, 0), (), ())))) == MaskClass(kind="causal")
        monkeypatch.setattr(mask_classes, "_launched", lambda *parts: pytest.fail("it is not tried again"))
    reason = mask_classes.unusable()
    assert reason is not None
    assert "no ptxas" in reason.sentence
