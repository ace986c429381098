"""What is read around linear layers of one row, by its meaning; and what is not."""

import pytest
import torch
import torch.nn.functional as F

import omnicomp
from omnicomp.passes import few_rows
from omnicomp.passes.few_rows import FewRows

WIDTH = 256


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """The pass as on a GPU; the operator computes its reference on the CPU."""
    monkeypatch.setattr(few_rows, "measured", lambda device: True)
    monkeypatch.setattr(FewRows, "of", lambda self, policy: FewRows())


def numbers(*shape):
    return torch.randn(*shape).bfloat16()


def details(function, *inputs):
    """What the pass made of a function, whose values have to be eager's; each rewrite is proved."""
    options = {"lowerings": ["eager"], "check_passes": True, "on_error": "raise", "certify": "always"}
    with torch.no_grad():
        expected = function(*inputs)
        found = torch.compile(function, backend="omni", options=options)(*inputs)
        torch.testing.assert_close(found, expected, atol=0.06, rtol=0.06)
    (graph,) = omnicomp.audit().graphs
    rewrites = [rewrite for rewrite in graph.rewrites if rewrite.name == "few_rows"]
    assert {rewrite.verdict for rewrite in rewrites} <= {"proved"}
    assert not [rewrite for rewrite in graph.rewrites if rewrite.name == "few_rows" and rewrite.kept]
    return [rewrite.detail.removeprefix("1 row, ") for rewrite in rewrites]


def written(x, gain, eps=1e-6):
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


NORMS = {
    "written": written,
    "called": lambda x, gain: F.rms_norm(x, (WIDTH,), gain, 1e-6),
    "by keywords": lambda x, gain: F.rms_norm(x, normalized_shape=(WIDTH,), weight=gain, eps=1e-6),
    "divided": lambda x, gain: gain * (x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6)),
    "a power": lambda x, gain: x.float() * (x.float().square().mean(-1, True) + 1e-6).pow(-0.5) * gain,
    "last in order": lambda x, gain: torch.rsqrt(1e-6 + torch.mean(torch.square(x), x.dim() - 1, True)) * x * gain,
    "one more": lambda x, gain: (
        x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + gain.float())
    ).type_as(x),
}
OTHERS = {
    "another mean": lambda x, gain: gain * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)),
    "of something else": lambda x, gain: gain * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6)),
    "a cube": lambda x, gain: gain * (x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1e-6)),
    "a root": lambda x, gain: gain * (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "turned over": lambda x, gain: gain * (torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) / x),
    "a tensor": lambda x, gain: gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + gain.sum().abs())),
    "no gain": lambda x, gain: F.rms_norm(x, (WIDTH,), None, 1e-6),
    "its own epsilon": lambda x, gain: F.rms_norm(x, (WIDTH,), gain),
    "of a mean": lambda x, gain: F.layer_norm(x, (WIDTH,), gain, eps=1e-6),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_norm_goes_into_the_layers_that_read_it(norm):
    x, gain, weights = numbers(1, 1, WIDTH), numbers(WIDTH), [numbers(n, WIDTH) / 16 for n in (64, 32)]

    def function(x, gain, *weights):
        y = norm(x, gain).to(x.dtype)
        return [F.linear(y, weight) * 2 for weight in weights]

    assert details(function, x, gain, *weights) == ["2 layers, norm"] * 2


@pytest.mark.parametrize("norm", OTHERS.values(), ids=OTHERS)
def test_what_is_no_norm_of_its_input_stays(norm):
    x, gain, weight = numbers(1, WIDTH).abs() + 0.1, numbers(WIDTH), numbers(64, WIDTH) / 16
    assert details(lambda x, gain, weight: F.linear(norm(x, gain), weight) * 2, x, gain, weight) == ["1 layer"]


def test_a_norm_that_others_read_stays():
    def function(x, gain, weight):
        y = written(x, gain)
        return F.linear(y, weight) * 2, y

    assert details(function, numbers(1, WIDTH), numbers(WIDTH), numbers(64, WIDTH) / 16) == ["1 layer"]


def test_a_norm_of_more_layers_than_a_launch_takes_goes_into_each():
    def function(x, gain, *weights):
        y = written(x, gain)
        return [F.linear(y, weight) * 2 for weight in weights]

    weights = [numbers(32, WIDTH) / 16 for _ in range(4)]
    found = details(function, numbers(1, WIDTH), numbers(WIDTH), *weights)
    assert found == ["3 layers, norm"] * 3 + ["1 layer, norm"]


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "module": torch.nn.SiLU(),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_gate_and_its_other_layer_are_one_result(activation, swapped):
    def function(x, first, second):
        if swapped:
            other, gate = F.linear(x, first), F.linear(x, second)
            return other * activation(gate) + 1
        return activation(F.linear(x, first)) * F.linear(x, second) + 1

    weights = [numbers(64, WIDTH) / 16 for _ in range(2)]
    assert details(function, numbers(1, WIDTH), *weights) == ["2 layers, gate"]


HALVES = {
    "chunk": lambda y: y.chunk(2, dim=-1),
    "a function": lambda y: torch.chunk(y, 2, -1),
    "split": lambda y: y.split(64, -1),
    "sizes": lambda y: torch.split(y, [64, 64], dim=1),
    "slices": lambda y: (y[..., :64], y[..., 64:]),
    "columns": lambda y: (y[:, :64], y[:, 64:]),
}


@pytest.mark.parametrize(("swapped", "bias"), [(False, False), (True, True)])
@pytest.mark.parametrize("halves", HALVES.values(), ids=HALVES)
def test_halves_of_one_layer_are_a_gate(halves, swapped, bias):
    def function(x, weight, bias):
        first, second = halves(F.linear(x, weight, bias))
        return (first * F.silu(second) if swapped else F.silu(first) * second) + 1

    inputs = numbers(1, WIDTH), numbers(128, WIDTH) / 16, numbers(128) if bias else None
    assert details(function, *inputs) == ["1 layer, gate"]


NO_HALVES = {
    "other sizes": lambda y: (y[..., :32], y[..., 32:64]),
    "overlapping": lambda y: (y[..., :64], y[..., 1:65]),
    "rows": lambda y: (y[None].chunk(2, 0)[0][..., :64], y[..., 64:]),
    "every other": lambda y: (y[..., ::2], y[..., 1::2]),
    "one half twice": lambda y: (y[..., :64], y[..., :64]),
}


@pytest.mark.parametrize("halves", NO_HALVES.values(), ids=NO_HALVES)
def test_other_parts_of_a_layer_are_no_gate(halves):
    def function(x, weight):
        first, second = halves(F.linear(x, weight))
        return F.silu(first) * second[..., : first.shape[-1]] + 1

    assert details(function, numbers(1, WIDTH), numbers(128, WIDTH) / 16) == ["1 layer"]


@pytest.mark.parametrize("index", [(slice(None), slice(-1, None)), slice(None), (..., slice(0, None), slice(None))])
def test_a_norm_is_read_through_slices_that_take_all(index):
    def function(x, gain, weight):
        return F.linear(written(x, gain)[index], weight) * 2

    assert details(function, numbers(1, 1, WIDTH), numbers(WIDTH), numbers(64, WIDTH) / 16) == ["1 layer, norm"]


def test_a_norm_of_more_rows_stays_where_one_is_read():
    def function(x, gain, weight):
        return F.linear(written(x, gain)[:, -1:], weight) * 2

    assert details(function, numbers(1, 3, WIDTH), numbers(WIDTH), numbers(64, WIDTH) / 16) in (["1 layer"], [])


GATES = {
    "another activation": lambda gate, other: torch.tanh(gate) * other,
    "read elsewhere": lambda gate, other: (F.silu(gate) * other, gate + 1),
    "added": lambda gate, other: F.silu(gate) + other,
    "times itself": lambda gate, other: F.silu(gate) * gate + other,
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_what_is_no_gate_stays(gate):
    weights = [numbers(64, WIDTH) / 16 for _ in range(2)]
    found = details(lambda x, a, b: gate(F.linear(x, a), F.linear(x, b)), numbers(1, WIDTH), *weights)
    assert found == ["2 layers"] * 2


def test_layers_of_other_sizes_are_no_gate():
    def function(x, first, second):
        return F.silu(F.linear(x, first)) * F.linear(x, second)

    assert details(function, numbers(1, WIDTH), numbers(1, WIDTH), numbers(64, WIDTH)) == ["2 layers"] * 2


@pytest.mark.parametrize("dropout", [False, True])
def test_a_residual_is_added_by_the_layers_kernel(dropout):
    def function(x, weight):
        y = F.linear(x, weight)
        return (x + (F.dropout(y, 0.1, training=False) if dropout else y)) * 2

    assert details(function, numbers(1, 1, WIDTH), numbers(WIDTH, WIDTH) / 16) == ["1 layer, sum"]


SUMS = {
    "a number": lambda x, y: y + 1,
    "broadcast": lambda x, y: x.unsqueeze(0) + y,
    "wider": lambda x, y: x.float() + y,
    "itself": lambda x, y: y + y,
    "weighted": lambda x, y: torch.add(x, y, alpha=2),
    "read elsewhere": lambda x, y: (x + y, y * 2),
}


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_other_sums_stay(add):
    found = details(lambda x, w: add(x, F.linear(x, w)), numbers(1, WIDTH), numbers(WIDTH, WIDTH) / 16)
    assert found == ["1 layer"]


def test_a_residual_that_is_written_to_stays():
    def function(x, weight):
        y = x + F.linear(x * 2, weight)
        x.add_(1)
        return y

    inputs = numbers(1, WIDTH), numbers(WIDTH, WIDTH) / 16
    with torch.no_grad():
        expected = function(inputs[0].clone(), inputs[1])
        compiled = torch.compile(function, backend="omni", options={"lowerings": ["eager"], "on_error": "raise"})
        torch.testing.assert_close(compiled(inputs[0].clone(), inputs[1]), expected)
    (graph,) = omnicomp.audit().graphs
    assert [rewrite.detail for rewrite in graph.rewrites if rewrite.name == "few_rows"] in ([], ["1 row, 1 layer"])


def test_layers_of_a_decoder_are_four_calls_and_each_is_proved():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, 128, 128))
            self.o = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            self.gate, self.up = (torch.nn.Linear(WIDTH, 512, bias=False) for _ in range(2))
            self.down = torch.nn.Linear(512, WIDTH, bias=False)
            self.first, self.second = (torch.nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(2))

        def forward(self, x):
            y = written(x, self.first)
            mixed = torch.cat([torch.tanh(self.q(y)[..., :128]) * self.k(y), self.v(y)], -1)
            x = x + self.o(mixed)
            y = written(x, self.second)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    model = torch.nn.Sequential(Layer(), Layer()).bfloat16().eval()
    found = details(model, numbers(1, 1, WIDTH))
    each = [*["3 layers, norm"] * 3, "1 layer, sum", "2 layers, norm, gate", "1 layer, sum"]
    assert sorted(found) == sorted(each * 2)
