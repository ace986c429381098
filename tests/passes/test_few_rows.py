import pytest
import torch
import torch.nn.functional as F

import omnicomp
from omnicomp.passes import few_rows
from omnicomp.passes.attention.timings import Budget, Timed, forget
from omnicomp.passes.few_rows import CUBLAS, KERNEL, LINEARS, FewRows, Problem

WIDTH = 256


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """The pass as on a GPU; the operator computes its reference on the CPU."""
    monkeypatch.setattr(few_rows, "measured", lambda device: True)
    monkeypatch.setattr(FewRows, "of", lambda self, policy: FewRows())


class Projections(torch.nn.Module):
    def __init__(self, sizes=(256, 64, 64), *, bias=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, size, bias=bias) for size in sizes)
        self.bfloat16().eval()

    def forward(self, x):
        return [layer(x) * 2 for layer in self.layers]


def rewrites(module, x, **options):
    """The rewrites of the pass in a compiled call, whose values have to be eager's."""
    options = {"lowerings": ["eager"], "check_passes": True, "on_error": "raise", **options}
    with torch.no_grad():
        expected = module(x.clone())
        torch.testing.assert_close(torch.compile(module, backend="omni", options=options)(x.clone()), expected)
    (graph,) = omnicomp.audit().graphs
    return [rewrite for rewrite in graph.rewrites if rewrite.name == "few_rows"]


def numbers(*shape):
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 16])
def test_layers_that_share_an_input_are_one_call(bias, rows):
    found = rewrites(Projections(bias=bias), numbers(rows, 1, WIDTH))
    assert [each.detail for each in found] == [f"{rows} row{'s' * (rows > 1)}, 3 layers"] * 3


def test_more_layers_than_a_launch_takes_are_several():
    found = rewrites(Projections((64,) * 4), numbers(1, WIDTH))
    assert [each.detail for each in found] == ["1 row, 3 layers"] * 3 + ["1 row, 1 layer"]


def test_one_layer_of_one_row_is_taken():
    assert len(rewrites(Projections((64,)), numbers(1, WIDTH))) == 1


def test_one_layer_of_several_rows_stays():
    assert not rewrites(Projections((64,)), numbers(2, WIDTH))


def test_large_layers_of_several_rows_stay(monkeypatch):
    monkeypatch.setattr(few_rows, "_MANY_WEIGHTS", 384 * WIDTH - 1)
    assert not rewrites(Projections(), numbers(2, WIDTH))


@pytest.mark.parametrize("x", [numbers(17, WIDTH), torch.randn(1, WIDTH)])
def test_other_inputs_stay(x):
    module = Projections().to(x.dtype)
    assert not rewrites(module, x)


def test_an_input_that_is_not_dense_stays():
    class Sliced(Projections):
        def forward(self, x):
            return super().forward(x[:, ::2])

    assert not rewrites(Sliced(), numbers(2, 2 * WIDTH))


def test_an_input_that_is_written_to_between_the_layers_stays():
    class Written(Projections):
        def forward(self, x):
            first = self.layers[0](x)
            x.add_(1)
            return first, self.layers[1](x)

    assert not rewrites(Written(), numbers(1, WIDTH))


def test_a_weight_that_is_made_behind_the_first_layer_stays():
    class Made(Projections):
        def forward(self, x):
            first = self.layers[0](x)
            return first, F.linear(x, self.layers[1].weight * first.sum())

    assert len(rewrites(Made(), numbers(1, WIDTH))) == 1


def test_layers_under_autocast_stay():
    def function(x, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, weight)

    x, weight = numbers(1, WIDTH), numbers(64, WIDTH)
    with torch.no_grad():
        compiled = torch.compile(function, backend="omni", options={"lowerings": ["eager"]})
        torch.testing.assert_close(compiled(x, weight), function(x, weight))
    (graph,) = omnicomp.audit().graphs
    assert not [rewrite for rewrite in graph.rewrites if rewrite.name == "few_rows"]


SPELLINGS = {
    "@": lambda x, w, b: x @ w.t(),
    "matmul": lambda x, w, b: torch.matmul(x, w.T),
    "mm": lambda x, w, b: torch.mm(x, w.transpose(0, 1)),
    "method": lambda x, w, b: x.mm(w.mT),
    "permuted": lambda x, w, b: x.matmul(w.permute(1, 0)),
    "vector": lambda x, w, b: x[0] @ w.t(),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
}
OTHERS = {
    "scaled": lambda x, w, b: torch.addmm(b, x, w.t(), beta=2),
    "as stored": lambda x, w, b: x @ w,
    "permuted back": lambda x, w, b: x @ w.permute(0, 1),
    "a bias of rows": lambda x, w, b: torch.addmm(b[None], x, w.t()),
    "transposed twice": lambda x, w, b: torch.mm(x, w.t().contiguous()),
}


class Spelt(torch.nn.Module):
    def __init__(self, spelling):
        super().__init__()
        self.spelling = spelling
        self.weight, self.bias = (torch.nn.Parameter(numbers(*shape)) for shape in ((WIDTH, WIDTH), (WIDTH,)))

    def forward(self, x):
        return self.spelling(x, self.weight, self.bias)


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_products_with_a_transposed_weight_are_layers(spelling):
    assert [each.detail for each in rewrites(Spelt(spelling), numbers(1, WIDTH))] == ["1 row, 1 layer"]


@pytest.mark.parametrize("spelling", OTHERS.values(), ids=OTHERS)
def test_other_products_stay(spelling):
    assert not rewrites(Spelt(spelling), numbers(1, WIDTH))


def test_products_and_layers_of_one_input_are_one_call():
    class Both(Projections):
        def forward(self, x):
            first, second, third = self.layers
            return first(x), x @ second.weight.t(), torch.mm(x, third.weight.T)

    assert [each.detail for each in rewrites(Both(), numbers(8, WIDTH))] == ["8 rows, 3 layers"] * 3


def test_training_keeps_its_layers():
    module = Projections()
    compiled = torch.compile(module, backend="omni", options={"lowerings": ["eager"]})
    compiled(numbers(1, WIDTH))
    (graph,) = omnicomp.audit().graphs
    assert not [rewrite for rewrite in graph.rewrites if rewrite.name == "few_rows"]


def test_weights_that_change_are_followed():
    module, x = Projections(), numbers(1, WIDTH)
    compiled = torch.compile(module, backend="omni", options={"lowerings": ["eager"]})
    with torch.no_grad():
        compiled(x)
        for parameter in module.parameters():
            parameter.data = numbers(*parameter.shape)
        torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("module", [Projections(), Spelt(SPELLINGS["addmm"])], ids=["linear", "addmm"])
def test_the_rewrite_has_a_certificate(module):
    found = rewrites(module, numbers(1, WIDTH), certify="always")
    assert found
    assert {each.verdict for each in found} <= {"proved", "proved_for_sizes"}


def test_the_operator_is_described_as_it_computes():
    x, weights = numbers(2, 3, WIDTH), [numbers(8, WIDTH), numbers(4, WIDTH)]
    torch.library.opcheck(LINEARS, (x, weights, []), test_utils=("test_schema", "test_faketensor"))


class FakeBench:
    """Says what layers take."""

    def __init__(self, **times):
        self.times, self.asked, self.first = times, [], 0.0

    def __call__(self, problem, device):
        self.asked.append(problem)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def layers(self, name):
        return self.times[name.partition(" ")[0]]


@pytest.mark.parametrize(
    ("names", "times", "best"),
    [
        ((KERNEL, CUBLAS), {"one": 0.020, "cublas": 0.015}, CUBLAS),
        ((CUBLAS, KERNEL), {"one": 0.020, "cublas": 0.025}, KERNEL),
        ((CUBLAS, KERNEL), {"one": 0.0202, "cublas": 0.0206}, CUBLAS),  # within the spread, the rule decides
    ],
)
def test_the_faster_way_is_taken_and_measured_once(names, times, best, monkeypatch, tmp_path):
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(few_rows, "versions", lambda device: ("a GPU",))
    problem = Problem(dtype=torch.bfloat16, rows=4, features=256, sizes=(64, 64), bias=False)
    bench, budget = FakeBench(**times), Budget(2.0)
    for _ in range(2):
        found = few_rows.decide(problem, names, budget, torch.device("cpu"), bench)
        assert found.best == best
        assert found.times == {KERNEL: times["one"], CUBLAS: times["cublas"]}
        forget()
    assert bench.asked == [problem]
    assert few_rows.decide(problem, names[:1], Budget(0.0), torch.device("cpu"), bench) is None


def test_what_was_measured_decides_against_the_rule(monkeypatch):
    asked = []

    def decided(problem, names, budget, device):
        asked.append((problem.rows, problem.sizes, names))
        ways = reversed(names)
        return Timed(best=names[1], times={name: 0.01 for name in ways})

    monkeypatch.setattr(FewRows, "of", lambda self, policy: FewRows(seconds=1.0))
    monkeypatch.setattr(few_rows, "measurable", lambda device: True)
    monkeypatch.setattr(few_rows, "decide", decided)
    assert not rewrites(Projections(), numbers(1, WIDTH))
    torch.compiler.reset()
    (found,) = rewrites(Projections((64,)), numbers(2, WIDTH))
    assert found.timed == {KERNEL: 0.01, CUBLAS: 0.01}
    assert asked == [(1, (256, 64, 64), (KERNEL, CUBLAS)), (2, (64,), (CUBLAS, KERNEL))]
