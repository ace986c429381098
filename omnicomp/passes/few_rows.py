"""Linear layers of few rows on CUDA: those that share an input become one kernel, which reads each weight where it is.

A product with a transposed weight is a layer, too. One whose weight is stored the other way round stays: the kernels
read rows.

A product of few rows takes as long as reading the weight. cuBLAS takes 5 µs however small the weight is, and reads a
large one at 60 to 90 % of the memory's speed. On an H200, in bfloat16, the kernel for one row was faster for all 14
weights that were measured (512 x 2048 to 32000 x 4096; 0.4 to 0.96 of cuBLAS' time), and the one for up to 16 rows
where several layers share an input and are small together. That is the rule; where the device can be asked, the layers
are timed both ways, once a machine. No copy of the weights is made, so that nothing has to follow them.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._pytree import tree_leaves

from omnicomp._torch.devices.timer import DeviceTimer, measurable, versions
from omnicomp._torch.dynamo.late_compile import is_subclass
from omnicomp._torch.fx import erase_unused
from omnicomp._torch.inductor import triton_ops
from omnicomp._torch.inductor.store import key_of
from omnicomp._torch.inductor.triton_ops import Buffer, Launch, Plan
from omnicomp.analysis.certify import NO_OVERFLOW, ROUNDING, Assumption
from omnicomp.analysis.nodes import SAME_VALUE, fake_value, insert_call, op_name
from omnicomp.options.digest import package_digest
from omnicomp.options.policy import Policy
from omnicomp.passes.attention.timings import Budget, Timed, fastest, known_or_measured
from omnicomp.passes.base import Pass, PassContext
from omnicomp.passes.kernels import measured

_HALF: Final = (torch.bfloat16, torch.float16)
_MAX_ROWS: Final = 16
_LAYERS: Final = 3  # of a launch
_MIN_FEATURES: Final = 256
# Bytes of weights that are read in turn when layers are timed: more than a cache holds.
_COLD_BYTES: Final = 1 << 28
KERNEL, CUBLAS = "one kernel", "cublas"
# Elements of the weights of a launch for several rows: 20.6 µs for 2^25, where cuBLAS took 21.8, and 7 % more beyond.
_MANY_WEIGHTS: Final = 1 << 25
_LINEAR: Final = frozenset(("torch.nn.functional.linear",))
_PRODUCTS: Final = frozenset("operator.matmul torch.matmul torch.mm Tensor.matmul Tensor.mm".split())
_SUMS: Final = frozenset(("torch.addmm", "Tensor.addmm"))
_TRANSPOSES: Final = frozenset("t T mT transpose swapaxes swapdims permute".split())
_MANY_OUTPUTS: Final = 8192  # of all layers, from which on there is work for all of a GPU in blocks of 32
# Options with which Inductor has other kernels for products, which it fuses with what is around them.
_TUNED: Final = ("max_autotune", "max_autotune_gemm", "coordinate_descent_tuning", "freezing")


# In the order in which the kernel numbers them, from 1 on.
_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def _reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gain: Tensor | None = None,
    offset: float = 0.0,
    eps: float = 0.0,
    addend: Tensor | None = None,
    gate: str = "",
) -> list[Tensor]:
    dtype = weights[0].dtype
    if gain is not None:
        wide = x.to(torch.promote_types(dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        x = (wide * (gain.to(wide.dtype) + offset)).to(dtype)
    made = [F.linear(x, weight, *biases[at : at + 1]) for at, weight in enumerate(weights)]
    if gate:
        made = [_ACTIVATIONS[gate](made[0]) * made[1]]
    return made if addend is None else [made[0] + addend]


def _plan(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gain: Tensor | None = None,
    offset: float = 0.0,
    eps: float = 0.0,
    addend: Tensor | None = None,
    gate: str = "",
) -> Plan:
    from omnicomp.passes.kernels import few_rows  # needs Triton

    features = x.shape[-1]
    rows = x.numel() // features
    sizes = [weight.shape[0] for weight in weights]
    results = [Buffer((*x.shape[:-1], size), weights[0].dtype) for size in (sizes[:1] if gate else sizes)]
    arguments: dict[str, Any] = {"x": x, "K": features, "BIAS": bool(biases), "LAYERS": len(sizes)}
    for name, given, none in (("w", weights, None), ("b", biases, None), ("o", results, None), ("N", sizes, 0)):
        arguments |= {f"{name}{at}": given[at] if at < len(given) else none for at in range(_LAYERS)}
    if rows == 1:
        del arguments["N2"]
        # Eight elements a thread: what was fastest, or within 8 % of that, for each weight.
        block = 2048 if features > 2048 else min(1024, 1 << (features - 1).bit_length())
        arguments |= {"gain": gain, "addend": addend, "NORM": gain is not None, "ADD": addend is not None}
        arguments |= {"OFFSET": offset, "EPS": eps, "ACT": ["", *_ACTIVATIONS].index(gate), "BK": block}
        programs = sizes[0] if gate else sum(sizes)
        launch = Launch(kernel=few_rows.one_row, grid=(programs,), warps=block // 256, arguments=arguments)
    elif gain is not None or addend is not None or gate:
        raise ValueError("linears_of_few_rows: only the kernel of one row takes a gain, an addend or a gate")
    else:
        # What was fastest with 8 rows on an H200, or within 5 % of that, for nine of ten weights.
        outputs, block = (32, 64) if sum(sizes) >= _MANY_OUTPUTS else (16, 256)
        grid = (sum(-(-size // outputs) for size in sizes),)
        arguments |= {"M": rows, "BN": outputs, "BK": block}
        arguments["EVEN"] = features % block == 0 and all(size % outputs == 0 for size in sizes)
        launch = Launch(kernel=few_rows.few_rows, grid=grid, warps=2, stages=4, arguments=arguments)
    return Plan(results=results, launches=[launch])


LINEARS: Final = triton_ops.define(
    "linears_of_few_rows(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? gain=None, float offset=0., "
    "float eps=0., Tensor? addend=None, str gate='') -> Tensor[]",
    _reference,
    _plan,
)
"""Linear layers of one input `x`: `biases` is empty, or has one for each of `weights`.

With a `gain`, the layers read the RMSNorm of `x` with it: `x / sqrt(mean(x²) + eps) * (gain + offset)`. With a `gate`,
an activation of `_ACTIVATIONS`, there are two layers and one result: the activation of the first, times the second. An
`addend` is added to a single result. These three are for one row on a GPU.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Layers that share an input, by all that their time depends on."""

    dtype: torch.dtype  # of the input and the weights
    rows: int  # of the input
    features: int  # of a row
    sizes: tuple[int, ...]  # how many results of a row each layer has
    bias: bool  # whether each has a bias


class Bench(DeviceTimer):
    """Layers timed with weights that no cache holds; a context manager, which holds them."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        super().__init__(device)
        self.problem = problem
        self._x = torch.empty(0)
        self._layers: Iterator[tuple[list[Tensor], list[Tensor]]] = iter(())

    def __enter__(self) -> "Bench":
        """Make the operands.

        Raises:
            RuntimeError: the device has no room for them.
        """
        super().__enter__()
        problem, generator = self.problem, torch.Generator(self._device).manual_seed(0)
        size = sum(problem.sizes) * problem.features * problem.dtype.itemsize
        copies = 1 + _COLD_BYTES // size

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self._device, dtype=problem.dtype)

        try:
            if copies * size > self.free():
                raise RuntimeError("the device has no room for a second set of weights")
            self._x = random(problem.rows, problem.features)
            biases = [random(each) for each in problem.sizes] if problem.bias else []
            sets = [[random(each, problem.features) for each in problem.sizes] for _ in range(copies)]
            self._layers = itertools.cycle([(weights, biases) for weights in sets])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._x, self._layers = torch.empty(0), iter(())
        super().__exit__(*error)

    def layers(self, name: str) -> float:
        """Milliseconds of all layers, by a kernel of this pass or by cuBLAS.

        Raises:
            RuntimeError: they can't be computed so.
        """
        compute = LINEARS if name == KERNEL else _reference
        return self.timed(lambda: compute(self._x, *next(self._layers)))


def decide(
    problem: Problem, names: Sequence[str], budget: Budget, device: torch.device, make: Any = Bench
) -> Timed | None:
    """The faster way for some layers, measured now or before; None if it can't be, or there is no time left.

    Args:
        problem: the layers.
        names: both ways; the second is taken where it is faster by more than the spread of times.
        budget: what measuring may take.
        device: where they run.
        make: makes what times them.
    """

    def measure(_: float) -> tuple[Timed | None, float]:
        times: dict[str, float] = {}
        first: dict[str, float] = {}
        with make(problem, device) as bench:
            for name in names:
                times[name], first[name] = round(bench.layers(name), 5), bench.first
        best = fastest(times)
        return Timed(best=best, times=times), first[best] if best == KERNEL else 0.0

    # The kernel is the package's own, so what was measured of another version is not known.
    return known_or_measured(key_of(package_digest(), versions(device), problem, names), device, budget, measure)


@dataclasses.dataclass(frozen=True)
class FewRows(Pass):
    """Computes linear layers of few rows in inference by kernels that read the weights at the memory's speed."""

    name: ClassVar[str] = "few_rows"
    told: ClassVar[bool] = False
    enabled: bool = True  # whether Inductor compiles the graph, and has no tuned kernels for products itself
    seconds: float = 0.0  # how long layers may be timed while a graph is compiled

    def claims(self, context: PassContext) -> tuple[Assumption, ...]:
        """The kernels sum in another order, in float32."""
        return tuple(map(Assumption, (ROUNDING, NO_OVERFLOW)))

    def of(self, policy: Policy) -> "FewRows":
        """This pass with the options that the user's policy gives it."""
        tuned = any(policy.inductor.get(key) for key in _TUNED)
        return FewRows(enabled="inductor" in policy.lowerings and not tuned, seconds=policy.attention_seconds)

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph is inference on a GPU that the kernels were measured on."""
        return (
            self.enabled
            and not context.training
            and measured(context.device)
            and any(_layer(node) is not None for node in module.graph.nodes)
        )

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Replace the layers, those that share an input together."""
        from omnicomp.passes.attention.nodes import is_pure
        from omnicomp.passes.dtypes.analysis import Scopes, changed_storages

        changed, scopes = changed_storages(module), Scopes(module)
        groups: dict[Any, list[_Layer]] = {}
        for node in module.graph.nodes:
            layer = _layer(node)
            if layer is not None and _fits(layer, changed) and node not in scopes.entered:
                groups.setdefault((layer.x, layer.bias is not None, scopes.number[node]), []).append(layer)
        made, budget = list[_Call](), Budget(self.seconds)
        place = {node: index for index, node in enumerate(module.graph.nodes)}
        for layers in groups.values():
            first = place[layers[0].node]
            early = [layer for layer in layers if all(place[each] <= first for each in layer.given)]
            for at in range(0, len(early), _LAYERS):
                if call := self._replaced(early[at : at + _LAYERS], budget):
                    made.append(call)
        for call in made:
            parts = _absorb(call, changed, scopes) if call.rows == 1 else []
            rows, layers = (f"{n} {what}{'s' * (n > 1)}" for n, what in ((call.rows, "row"), (call.layers, "layer")))
            detail = ", ".join((rows, layers, *parts))
            for node in call.results:
                target, times = str(LINEARS.name()), call.timed and call.timed.times
                context.rewrite(self.name, "linear", node, target=target, detail=detail, timed=times)
        if made:
            erase_unused(module.graph, is_pure)
        return PassResult(module, bool(made))

    def _replaced(self, layers: Sequence["_Layer"], budget: Budget) -> "_Call | None":
        """The call that computes these layers now; None if they stay."""
        x, weights = layers[0].x, [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        given = fake_value(x)
        rows, features = given.numel() // given.shape[-1], given.shape[-1]
        sizes = tuple(fake_value(weight).shape[0] for weight in weights)
        ruled = rows == 1 or (len(layers) > 1 and sum(sizes) * features <= _MANY_WEIGHTS)
        timed = None
        if budget.enabled and measurable(given.device):
            problem = Problem(dtype=given.dtype, rows=rows, features=features, sizes=sizes, bias=bool(biases))
            timed = decide(problem, (KERNEL, CUBLAS) if ruled else (CUBLAS, KERNEL), budget, given.device)
        if not (ruled if timed is None else timed.best == KERNEL):
            return None
        made = insert_call(layers[0].node, LINEARS, (x, weights, biases))
        results = [layer.node for layer in layers]
        for at, node in enumerate(results):
            _make_result(node, made, at)
        return _Call(made, rows, len(layers), timed, results)


@dataclasses.dataclass
class _Call:
    """A call of the operator, and the nodes that are its results."""

    node: Node
    rows: int
    layers: int
    timed: Timed | None
    results: list[Node]


def _make_result(node: Node, call: Node, at: int) -> None:
    """Let a node be one of the results of a call."""
    node.op, node.target, node.args, node.kwargs = "call_function", operator.getitem, (call, at), {}
    node.meta[SAME_VALUE] = True


def _absorb(call: _Call, changed: set[int], scopes: Any) -> list[str]:
    """Let a call for one row compute what is around its layers, which is told by name."""
    from omnicomp.passes.dtypes.analysis import storages
    from omnicomp.passes.few_rows_patterns import addend_of, gate_of, halves_of, norm_of

    x, weights, biases = cast(Any, call.node.args)
    layers = call.results
    norm, gated, added = norm_of(x), None, None
    if norm and not all(user.target is LINEARS for user in x.users):
        norm = None
    halves = halves_of(layers[0]) if len(layers) == 1 else None
    if len(layers) == 2 and fake_value(weights[0]).shape == fake_value(weights[1]).shape:
        gated = gate_of(*layers)
    elif halves:
        gated = gate_of(*halves)
    elif len(layers) == 1:
        added = addend_of(layers[0])
    last = gated[0] if gated else added[0] if added else layers[0]
    around = [*([x, norm.x, norm.gain] if norm else []), *([added[1]] if added else []), last]
    scoped = any(each in scopes.entered for each in around) or scopes.number[last] != scopes.number[layers[0]]
    changing = fake_value(last).requires_grad or any(storages(each) & changed for each in around)
    if scoped or changing or not (norm or gated or added):
        return []
    if gated and halves:
        weights, biases = (_halved(each, last) for each in (weights, biases))
    if gated and gated[1] is not (halves or layers)[0]:
        weights, biases = (list(reversed(each)) for each in (weights, biases))
    read = (norm.x, weights, biases, norm.gain, norm.offset, norm.eps) if norm else (x, weights, biases, None, 0.0, 0.0)
    made = insert_call(last, LINEARS, (*read, added[1] if added else None, gated[3] if gated else ""))
    if gated or added:
        _make_result(last, made, 0)
        call.results = [last]
    else:
        call.node.replace_all_uses_with(made)
    return [name for name, part in (("norm", norm), ("gate", gated), ("sum", added)) if part]


def _halved(given: Sequence[Node], anchor: Node) -> list[Node]:
    """The halves of a weight or bias along its first dimension, made before a node; none of none."""
    return [
        insert_call(anchor, operator.getitem, (each, slice(*bounds)))
        for each in given
        for half in (fake_value(each).shape[0] // 2,)
        for bounds in ((None, half), (half, None))
    ]


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A linear layer, however it is spelt: `x`, a weight of one row for each output, and a bias."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None

    @property
    def given(self) -> list[Node]:
        return [self.x, self.weight, *([] if self.bias is None else [self.bias])]


def _layer(node: Node) -> _Layer | None:
    """A node as a linear layer: `linear`, or a product with a weight that is transposed, to which a bias is added."""
    name = op_name(node)
    if node.kwargs or name not in _LINEAR | _PRODUCTS | _SUMS:
        return None
    given: list[Any] = [*([] if name in _SUMS else [None]), *node.args]
    bias, *factors = given
    if name in _LINEAR and len(factors) == 3:
        bias = factors.pop()
    if len(factors) != 2 or not all(isinstance(value, Node) for value in factors) or not isinstance(bias, Node | None):
        return None
    x, weight = factors
    if name not in _LINEAR and (weight := _transposed(weight)) is None:
        return None
    return _Layer(node, x, weight, bias)


def _transposed(node: Any) -> Node | None:
    """The dense matrix that a node is the transpose of."""
    viewed = node.op == "call_method" or op_name(node) == "builtins.getattr" or op_name(node).startswith("torch.")
    given: Any = node.args[0] if node.args and viewed else None
    name = node.args[1] if op_name(node) == "builtins.getattr" else op_name(node).rpartition(".")[2]
    if name not in _TRANSPOSES or not isinstance(given, Node):
        return None
    whole, view = fake_value(given), fake_value(node)
    if not all(isinstance(value, Tensor) and value.dim() == 2 for value in (whole, view)):
        return None
    # Both sizes above 1, so that strides tell a transpose from the matrix itself.
    if not all(type(size) is int and size > 1 for size in whole.shape) or not whole.is_contiguous():
        return None
    return given if (view.shape, view.stride()) == (whole.shape[::-1], whole.stride()[::-1]) else None


def _fits(layer: _Layer, changed: set[int]) -> bool:
    """Whether the kernels take a layer, and nothing that it reads is written to in the graph."""
    from omnicomp.passes.dtypes.analysis import storages

    given = layer.given
    fakes, made = [fake_value(value) for value in given], fake_value(layer.node)
    tensors = [leaf for leaf in tree_leaves([*fakes, made]) if isinstance(leaf, Tensor)]
    if len(tensors) != len(given) + 1 or made.requires_grad or made.dtype not in _HALF:
        return False
    x, weight = fakes[:2]
    return (
        all(_is_plain(each) and each.dtype is made.dtype and each.device == made.device for each in tensors)
        and weight.dim() == 2
        and weight.shape[1] >= _MIN_FEATURES
        and 1 <= x.numel() // x.shape[-1] <= _MAX_ROWS
        and (layer.bias is None or fakes[2].shape == weight.shape[:1])
        and not any(storages(value) & changed for value in given)
    )


def _is_plain(value: Tensor) -> bool:
    """Whether a fake tensor is dense, of fixed sizes, and no wrapper of others."""
    static = all(type(size) is int for size in value.shape)
    plain = not is_subclass(value) and value.layout is torch.strided
    return static and plain and value.numel() > 0 and value.is_contiguous() and not value.is_neg()
