"""Masks that are inputs, buffers or computed from them, under omni against float64, and what is left of them."""

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import incoming_masks
import pytest
import torch
import torch.nn.functional as F
from fusion import Backend
from incoming_masks import OPTIONS, Program, check, random_program
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import omnicomp
from omnicomp._torch.autograd.flex import FLEX
from omnicomp.passes import verdicts
from omnicomp.passes.attention import assume, flexible
from omnicomp.timeline import Retreat, Rewrite, Speculation

MIN = torch.finfo(torch.float32).min
CAUSAL = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "start",
    [
        0,
        *(pytest.param(10 * n, marks=pytest.mark.slow) for n in range(1, 11)),
        *(pytest.param(10 * n, marks=[pytest.mark.slow, pytest.mark.long]) for n in range(11, 50)),
    ],
)
def test_random_programs_give_what_eager_gives(start: int, request: pytest.FixtureRequest) -> None:
    seed = int(request.config.getoption("--seed") or 0)
    programs = [random_program(seed, index) for index in range(start, start + 10)]
    outcomes = [check(program) for program in programs]
    for program, outcome in zip(programs, outcomes, strict=True):
        assert outcome.settled or not (outcome.known and outcome.fused), program
    assert sum(outcome.fused for outcome in outcomes) >= 7


def test_the_check_of_a_program_sees_a_mask_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "classified", lambda numbers: verdicts.MaskClass(kind="causal"))
    with pytest.raises(incoming_masks.Failure, match="off by"):
        check(Program(masks=("full", "causal", "")))


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attention is large enough, so that small ones show what is done with large ones."""
    monkeypatch.setattr(assume, "worth", lambda *args, **kwargs: None)


def operands(size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, size, 8, generator=generator) for _ in range(3))
    return q, k, v


def details() -> list[str]:
    return [event.detail for event in omnicomp.timeline.events() if isinstance(event, Rewrite)]


def classes() -> list[str]:
    found = [event for event in omnicomp.timeline.events() if isinstance(event, Speculation)]
    return [event.sentence.rpartition(": ")[2] for event in found if event.state == "compiled"]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def added(visible: Tensor, lowest: float = MIN) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, lowest)


def test_a_buffer_below_the_diagonal_leaves_nothing_of_the_mask(pays: None) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.ones(16, 16).tril().view(1, 1, 16, 16))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            size = q.shape[2]
            scores = q @ k.mT * 0.25
            return scores.masked_fill(self.bias[:, :, :size, :size] == 0, -math.inf).softmax(-1) @ v

    model = Layer()
    compiled = torch.compile(model, backend="omni", options=OPTIONS, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*operands()), model(*operands()))
        assert [detail.partition(";")[0] for detail in details()] == ["scale=0.25, is_causal"]
        model.bias[..., 5, 0] = 0.0
        torch.testing.assert_close(compiled(*operands()), model(*operands()))
    assert classes() == ["causal", "no row is empty"]


@pytest.mark.parametrize("call", [False, True], ids=["written out", "a call"])
def test_layers_compiled_one_by_one_check_a_mask_once(call: bool, pays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    sent: Callable[[Any], Any] = verdicts._sent
    monkeypatch.setattr(verdicts, "_sent", lambda asked: (checked.extend(asked), sent(asked))[1])
    monkeypatch.setattr(verdicts, "_remembers", lambda value: True)
    verdicts.forget()

    class Layer(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) if call else attend(q, k, v, mask)

    layers = [torch.compile(Layer(), backend="omni", options=OPTIONS, fullgraph=True) for _ in range(4)]
    q, k, v = operands()
    with torch.no_grad():
        for step in range(3):
            mask = added(CAUSAL)
            for layer in layers:
                q = layer(q, k, v, mask)
            assert len(checked) == step + 1
    assert {detail.partition(";")[0] for detail in details()} <= {"scale=0.25, is_causal", "scale=0.353553, is_causal"}
    verdicts.forget()


def test_masks_of_one_graph_have_classes_of_their_own(pays: None) -> None:
    def two(q: Tensor, k: Tensor, v: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return attend(attend(q, k, v, first), k, v, second)

    compiled = torch.compile(two, backend="omni", options=OPTIONS, fullgraph=True)
    full, padded = torch.ones_like(CAUSAL), CAUSAL & (torch.arange(8) > 1)
    for first, second in ((CAUSAL, full), (full, CAUSAL), (padded, CAUSAL), (padded, padded), (CAUSAL, full)):
        masks = added(first), added(second)
        torch.testing.assert_close(compiled(*operands(), *masks), two(*operands(), *masks))
    assert classes()[:3] == ["full", "causal", "causal"]
    assert [detail.partition(";")[0] for detail in details()][:2] == ["scale=0.25, is_causal", "scale=0.25"]


@pytest.mark.parametrize("training", [False, True])
def test_a_bound_that_no_score_reaches_does_not_keep_a_mask(training: bool, pays: None) -> None:
    def clamped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.max(q @ k.mT * 0.25 + mask, torch.tensor(MIN)).softmax(-1) @ v

    compiled = torch.compile(clamped, backend="omni", options=OPTIONS, fullgraph=True)
    q, k, v = (x.requires_grad_(training) for x in operands())
    right = CAUSAL & (torch.arange(8) < torch.tensor([[8], [5]])[:, None, None])
    for visible in (CAUSAL, torch.ones_like(CAUSAL), right, CAUSAL.triu(-2), CAUSAL):
        found, wanted = (run(q, k, v, added(visible.expand(2, 1, 8, 8))) for run in (compiled, clamped))
        torch.testing.assert_close(found, wanted)
        if training:
            pairs = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, wanted)]
            torch.testing.assert_close(*pairs)
    assert classes() == ["causal", "full", "the class of the mask"]


def test_a_mask_that_is_added_in_place_is_only_read(pays: None) -> None:
    def adds(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT * 0.25
        scores += mask
        return scores.softmax(-1) @ v

    compiled = torch.compile(adds, backend="omni", options=OPTIONS, fullgraph=True)
    for visible in (CAUSAL, torch.ones_like(CAUSAL)):
        torch.testing.assert_close(compiled(*operands(), added(visible)), adds(*operands(), added(visible)))
    assert classes() == ["causal", "full"]


def test_a_mask_that_is_changed_by_an_operator_in_place_is_not_assumed(pays: None) -> None:
    def changes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mask += added(CAUSAL.mT)
        mask[..., 0] = 0.0
        return attend(q, k, v, mask)

    compiled = torch.compile(changes, backend="omni", options=OPTIONS, fullgraph=True)
    for visible in (CAUSAL, torch.ones_like(CAUSAL)):
        masks = [added(visible) for _ in range(2)]
        torch.testing.assert_close(compiled(*operands(), masks[0]), changes(*operands(), masks[1]))
    assert not classes()


def test_variants_are_bounded_in_number(pays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    read = assume._Wish.of.__func__

    def wishes_bands(cls: Any, *args: Any) -> Any:
        return dataclasses.replace(read(cls, *args), accepts=frozenset(("full", "causal", "band", "prefix")))

    monkeypatch.setattr(assume._Wish, "of", classmethod(wishes_bands))
    compiled = torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)
    for width in range(1, 8):
        mask = added(CAUSAL.triu(-width))
        torch.testing.assert_close(compiled(*operands(), mask), attend(*operands(), mask))
    assert len(classes()) == 5


def test_right_padding_under_a_causal_mask_costs_no_operators_for_empty_rows(pays: None) -> None:
    def padded(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        hidden = torch.ones(8, 8, dtype=torch.bool).triu(1) | (padding[:, None, None] == 0)
        return (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v

    right = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]])
    compiled = torch.compile(padded, backend="omni", options=OPTIONS, fullgraph=True)
    for padding in (right, right.flip(1), torch.ones_like(right)):
        found, wanted = compiled(*operands(), padding), padded(*operands(), padding)
        torch.testing.assert_close(found, wanted, equal_nan=True)
    assert classes() == ["the first key is seen", "the class of the mask", "full"]


def test_what_is_not_fused_even_so_is_not_checked(pays: None) -> None:
    def lifted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.mT).masked_fill(~mask, -1e9) * -1.0).softmax(-1) @ v

    compiled = torch.compile(lifted, backend="omni", options=OPTIONS, fullgraph=True)
    for mask in (CAUSAL, torch.ones_like(CAUSAL)):
        torch.testing.assert_close(compiled(*operands(), mask), lifted(*operands(), mask))
    assert not classes()


@pytest.fixture
def blocks(pays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention leaves out blocks and has gradients, as on CUDA; here torch computes it in eager."""
    for module in (assume, flexible):
        monkeypatch.setattr(module, "skips_blocks", lambda site: True)
    monkeypatch.setattr(assume, "SPARSE_PAIRS", 1)
    monkeypatch.setattr(flexible, "unsupported", lambda spec, **options: None)


def documents(*lengths: int, size: int = 512) -> Tensor:
    """A sequence for each length, packed with documents of that length."""
    numbers = [torch.arange(size) // length for length in lengths]
    return torch.stack([(number[:, None] == number)[None] for number in numbers])


LATE = torch.ones(512, 512, dtype=torch.bool).tril()


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["bools", "numbers", "call"])
def test_documents_that_come_in_are_runs_between_two_keys(
    kind: str, training: bool, dynamic: bool, blocks: None
) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if kind == "call":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25)
        if kind == "numbers":
            return attend(q, k, v, mask)
        return (q @ k.mT * 0.25).masked_fill(~mask, -math.inf).softmax(-1) @ v

    compiled = torch.compile(layer, backend="omni", options=OPTIONS, fullgraph=True, dynamic=dynamic)
    q, k, v = (x.requires_grad_(training) for x in operands(512))
    packed = documents(100, 160)
    some = LATE.expand(1, 1, 512, 512) & (torch.rand(512, generator=torch.Generator().manual_seed(0)) < 0.9)
    some[..., 0] = True
    for visible in (packed, packed & LATE, documents(90), LATE[None, None], some, packed & LATE.mT):
        visible = visible.expand(2, 1, 512, 512).clone(memory_format=torch.contiguous_format)
        mask = added(visible) if kind == "numbers" else visible
        found, wanted = (run(q, k, v, mask) for run in (compiled, layer))
        torch.testing.assert_close(found, wanted)
        if training:
            pairs = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, wanted)]
            torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-5)
    assert classes()[0] == "short runs of keys"
    assert classes().count("short runs of keys") == 1
    assert "mask (short runs of keys)" in details()[0]
    assert not [event for event in omnicomp.timeline.events() if isinstance(event, Retreat)]


def test_layers_find_the_ends_of_runs_once(blocks: None) -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        inner = attend(q, k, v, mask)
        return attend(attend(inner, k, v, mask), k, v, mask.mT)

    backend, (q, k, v) = Backend(training=True, speculate=True), (x.requires_grad_() for x in operands(512))
    mask = added(documents(100, 160))
    found = torch.compile(layers, backend=backend, fullgraph=True)(q, k, v, mask)
    torch.testing.assert_close(found, layers(q, k, v, mask))
    calls = [node.target for node in backend.graphs[0].graph.nodes]
    assert (calls.count(FLEX), calls.count(torch.amin), calls.count(torch.amax)) == (3, 2, 2)


def test_documents_stay_a_mask_where_blocks_are_not_left_out(pays: None) -> None:
    compiled = torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)
    mask = added(documents(100))
    torch.testing.assert_close(compiled(*operands(512), mask), attend(*operands(512), mask))
    assert "dense mask" in details()[0]
    assert classes() == ["no row is empty"]


def test_a_call_whose_first_mask_is_general_gets_a_variant_for_the_next(pays: None) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    compiled = torch.compile(call, backend="omni", options=OPTIONS, fullgraph=True)
    for mask in (CAUSAL.flip(-1), CAUSAL, CAUSAL.flip(-1)):
        torch.testing.assert_close(compiled(*operands(), mask), call(*operands(), mask))
    assert classes() == ["the class of the mask", "causal"]


def test_a_bias_that_requires_grad_is_not_looked_at(pays: None) -> None:
    mask = added(CAUSAL).requires_grad_()
    compiled = torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)
    gradients = []
    for run in (compiled, attend):
        run(*operands(), mask).square().sum().backward()
        assert mask.grad is not None
        gradients.append(mask.grad.clone())
        mask.grad = None
    torch.testing.assert_close(*gradients)
    assert not classes()


def test_a_mask_that_the_graph_writes_to_is_not_assumed(pays: None) -> None:
    def writes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        first = attend(q, k, v, mask)
        mask.add_(1.0)
        return first + attend(q, k, v, mask * 2.0)

    masks = [added(CAUSAL) for _ in range(2)]
    compiled = torch.compile(writes, backend="omni", options=OPTIONS, fullgraph=True)
    torch.testing.assert_close(compiled(*operands(), masks[0]), writes(*operands(), masks[1]))
    torch.testing.assert_close(masks[0], masks[1])
    assert not classes()


@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints_and_accumulated_gradients(inside: bool, pays: None) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(attend, q, k, v, mask, use_reentrant=False) if inside else attend(q, k, v, mask)

    compiled = torch.compile(layer, backend="omni", options=OPTIONS, fullgraph=True)
    results = []
    for run in (compiled, layer):
        q, k, v = (x.requires_grad_() for x in operands())
        for visible in (CAUSAL, torch.ones_like(CAUSAL), CAUSAL):
            mask = added(visible)
            for _ in range(2):
                out = run(q, k, v, mask) if inside else checkpoint(run, q, k, v, mask, use_reentrant=False)
                out.square().sum().backward()
        results.append((q.grad, k.grad, v.grad))
    torch.testing.assert_close(*results)
    assert classes() == ["causal", "full"]
    assert not [event for event in omnicomp.timeline.events() if isinstance(event, Retreat)]


def test_switches_of_grad_mode_share_what_is_known(pays: None) -> None:
    compiled = torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)
    mask = added(CAUSAL)
    q, k, v = operands()
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(compiled(q, k, v, mask), attend(q, k, v, mask))
    assert set(classes()) == {"causal"}


@pytest.mark.parametrize("number", [-0.5, -1e4, math.inf, math.nan, 1e9])
def test_what_is_added_and_hides_nothing_stays(number: float, pays: None) -> None:
    compiled = torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)
    for mask in (added(CAUSAL), added(CAUSAL, number)):
        torch.testing.assert_close(compiled(*operands(), mask), attend(*operands(), mask), equal_nan=True)
    assert classes()[0] == "causal"


def test_numbers_that_may_not_hide_are_told_beside_the_name(pays: None) -> None:
    torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)(*operands(), added(CAUSAL, -1e4))
    told = [event.sentence for graph in omnicomp.audit().graphs for event in graph.speculations]
    assert told[-1] == "the class of the mask: no row is empty (causal, by numbers that may not hide a key)"


def test_small_attentions_and_switched_off_ones_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)(*operands(), added(CAUSAL))
    monkeypatch.setattr(assume, "worth", lambda *args, **kwargs: None)
    options = {**OPTIONS, "speculate": False}
    torch.compile(lambda *args: attend(*args), backend="omni", options=options)(*operands(), added(CAUSAL))
    assert not classes()


def test_the_audit_tells_the_class_and_how_often_each_variant_ran(pays: None) -> None:
    compiled = torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)
    right = CAUSAL & (torch.arange(8) < torch.tensor([[8], [5]])[:, None, None])
    compiled(*operands(), added(right))
    for _ in range(20):
        compiled(*operands(), added(CAUSAL))
    speculations = [event for graph in omnicomp.audit().graphs for event in graph.speculations]
    told = [(event.state, event.sentence, event.calls) for event in speculations]
    assert ("held", "the class of the mask: no row is empty (causal and right padding)", 0) in told
    assert [row for row in told if row[0] == "ran"] == [("ran", "the class of the mask: causal", 16)]
    assert "in 16 calls or more" in omnicomp.audit().to_text()


@pytest.mark.parametrize("layout", ["plain", "sliced", "offset", "transposed", "expanded"])
def test_a_parameter_without_gradient_is_a_mask_in_any_layout(layout: str, pays: None) -> None:
    class Layer(nn.Module):
        def __init__(self, mask: Tensor) -> None:
            super().__init__()
            self.mask = nn.Parameter(mask, requires_grad=False)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, self.mask)

    made = added(CAUSAL)
    big = F.pad(made, (2, 2, 2, 2))
    layouts = {
        "plain": made,
        "sliced": F.pad(made, (0, 2, 0, 2))[..., :8, :8],
        "offset": big[..., 2:-2, 2:-2],
        "transposed": made.mT.contiguous().mT,
        "expanded": made.expand(2, 1, 8, 8),
    }
    model = Layer(layouts[layout])
    compiled = torch.compile(model, backend="omni", options=OPTIONS, fullgraph=True)
    torch.testing.assert_close(compiled(*operands()), model(*operands()))
    assert [detail.partition(";")[0] for detail in details()] == ["scale=0.25, is_causal"]


def test_a_row_that_a_parameter_without_gradient_hides_is_what_it_is_in_eager() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
            self.mask[3] = -math.inf

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, self.mask)

    model = Layer()
    compiled = torch.compile(model, backend="omni", options=OPTIONS, fullgraph=True)
    torch.testing.assert_close(compiled(*operands()), model(*operands()), equal_nan=True)


class MultiHead(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention, self.options = nn.MultiheadAttention(16, 2, batch_first=True), options

    def forward(self, x: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        return self.attention(x, x, x, attn_mask=mask, key_padding_mask=padding, **self.options)[0]


LATER = ~CAUSAL[0, 0]
WHOLE = torch.zeros(2, 8, dtype=torch.bool)


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, pytest.param({"need_weights": False}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["bools", "numbers"])
@pytest.mark.parametrize(
    ("mask", "padding", "expected"),
    [
        (LATER, None, "is_causal, as the mask is"),
        (LATER.expand(4, 8, 8), None, "is_causal, as the mask is"),
        (LATER, WHOLE, "is_causal, as the mask is"),
        (None, WHOLE, "no padding, as it hides nothing"),
    ],
)
def test_masks_of_multi_head_attention_have_classes(
    mask: Tensor | None, padding: Tensor | None, expected: str, kind: str, options: Any, training: bool, pays: None
) -> None:
    model = MultiHead(**options).train(training)
    compiled = torch.compile(model, backend="omni", options=OPTIONS, fullgraph=True)
    x = torch.randn(2, 8, 16)

    def as_passed(value: Tensor | None) -> Tensor | None:
        return added(~value, -math.inf) if kind == "numbers" and value is not None else value

    # No row is left empty: what eager makes of one here depends on whether it takes its fast path.
    other = (None if mask is None else mask.mT, None if padding is None else padding | (torch.arange(8) < 1))
    with torch.set_grad_enabled(training):
        for given in ((mask, padding), other, (mask, padding)):
            passed = [as_passed(value) for value in given]
            found, wanted = compiled(x, *passed), model(x, *passed)
            torch.testing.assert_close(found, wanted, equal_nan=True)
            if training and not wanted.isnan().any():
                pairs = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (found, wanted)]
                torch.testing.assert_close(*pairs)
    assert expected in details()[0]
    assert not [event for event in omnicomp.timeline.events() if isinstance(event, Retreat)]


def test_masks_of_weights_that_are_used_are_not_looked_at(pays: None) -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    compiled = torch.compile(lambda x: attention(x, x, x, attn_mask=LATER), backend="omni", options=OPTIONS)
    x = torch.randn(2, 8, 16)
    torch.testing.assert_close(compiled(x), attention(x, x, x, attn_mask=LATER))
    assert not classes()


def _by_numpy(mask: Tensor, new: Tensor) -> None:
    mask.numpy()[...] = new.numpy()


@pytest.mark.parametrize(
    "write",
    [
        _by_numpy,
        pytest.param(lambda mask, new: mask.data.copy_(new), id="data"),
        pytest.param(lambda mask, new: mask.set_(new), id="set_"),
    ],
)
def test_writes_that_nobody_counts_are_seen_on_the_cpu(write: Callable[[Tensor, Tensor], Any], pays: None) -> None:
    compiled = torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)
    mask = added(CAUSAL)
    for visible in (CAUSAL, torch.ones_like(CAUSAL), CAUSAL.triu(-2), CAUSAL):
        write(mask, added(visible))
        torch.testing.assert_close(compiled(*operands(), mask), attend(*operands(), mask))
    assert classes() == ["causal", "full", "no row is empty"]


def test_a_mask_for_the_next_token_is_full_though_the_mask_of_the_prompt_is_causal(pays: None) -> None:
    compiled = torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)
    everything = added(torch.ones(1, 1, 16, 16, dtype=torch.bool).tril())
    q, k, v = operands(16)
    with torch.no_grad():
        for first, last in ((0, 8), *((n, n + 1) for n in range(8, 12))):
            given = q[:, :, first:last], k[:, :, :last], v[:, :, :last], everything[:, :, first:last, :last]
            torch.testing.assert_close(compiled(*given), attend(*given))
    assert set(classes()) == {"causal", "full"}


def test_threads_with_masks_of_different_classes(pays: None) -> None:
    compiled = torch.compile(attend, backend="omni", options=OPTIONS, fullgraph=True)
    q, k, v = operands()
    masks = [added(visible) for visible in (CAUSAL, torch.ones_like(CAUSAL), CAUSAL & (torch.arange(8) < 6))]
    wanted = [attend(q, k, v, mask) for mask in masks]
    compiled(q, k, v, masks[0])

    def run(number: int) -> None:
        mask = masks[number % 3].clone()
        torch.testing.assert_close(compiled(q, k, v, mask), wanted[number % 3])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(24)))


@pytest.mark.slow
def test_layers_under_fully_shard_with_checkpoints_and_accumulated_gradients(tmp_path: Path) -> None:
    """Two ranks; each layer is compiled and sharded by itself, and gets masks of several classes."""
    multiprocessing.start_processes(_sharded, (str(tmp_path / "store"),), nprocs=2, start_method="spawn")


class _ShardedLayer(nn.Module):
    def __init__(self, *, call: bool) -> None:
        super().__init__()
        self.packed, self.call = nn.Linear(16, 48), call

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.packed(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask) if self.call else attend(q, k, v, mask)
        return x + out.transpose(1, 2).reshape(x.shape)


def _sharded(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = distributed.init_device_mesh("cpu", (2,))
    assume.worth = lambda *args, **kwargs: None
    visible = CAUSAL.expand(2, 1, 8, 8)
    padded = visible & (torch.arange(8) < torch.tensor([8, 5])[:, None])[:, None, None]
    for call, recomputed in ((False, True), (True, False)):
        results: list[Tensor] = []
        for compiled in (False, True):
            torch.compiler.reset()
            omnicomp.timeline.clear()
            torch.manual_seed(0)
            layers = nn.Sequential(*(_ShardedLayer(call=call) for _ in range(2)))
            for layer in layers:
                if compiled:
                    layer.compile(backend="omni", options=OPTIONS)
                fully_shard(layer, mesh=mesh)
            model: Any = fully_shard(layers, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            torch.manual_seed(rank + 1)
            losses: list[Tensor] = []
            for step, seen in enumerate((visible, padded, visible) * 2):
                x, mask = torch.randn(2, 8, 16), added(seen, -1e30)
                model.set_requires_gradient_sync(step % 2 == 1)
                for layer in layers:
                    x = checkpoint(layer, x, mask, use_reentrant=False) if recomputed else layer(x, mask)
                loss = x.square().mean()
                loss.backward()
                losses.append(loss.detach())
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append(torch.stack(losses))
        torch.testing.assert_close(*results)
        assert "causal" in classes()
        assert not [event for event in omnicomp.timeline.events() if isinstance(event, Retreat)]
    distributed.destroy_process_group()
