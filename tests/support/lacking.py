"""Devices on the CPU's memory that lack dtypes, and the proof that a graph does without them."""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omnicomp._torch.autograd import aot_autograd
from omnicomp.devices import Capabilities
from omnicomp.passes.base import PassContext, run_pipeline
from omnicomp.passes.legal.dtypes import INTEGERS
from omnicomp.passes.legalise import Legalise
from omnicomp.timeline import Timeline

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex128, torch.complex64)

# Operators whose indices are int64 in torch, whatever a program says. Nothing else may touch those.
_INDICES = frozenset(
    "argmax argmin topk sort max min nonzero gather scatter scatter_add scatter_reduce take put index_copy index_fill "
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward value_selecting_reduction_backward "
    "kthvalue mode median cummax cummin max_pool2d_with_indices max_pool2d_with_indices_backward one_hot".split()
)
_CASTS = frozenset("_to_copy to copy copy_".split())
_VIEWS = frozenset(
    "view _unsafe_view reshape t transpose permute expand unsqueeze squeeze select slice split chunk unbind clone "
    "detach alias as_strided unfold _reshape_alias split_with_sizes diagonal narrow".split()
)
_MOVES = _VIEWS | frozenset(
    "index_select index empty zeros ones full empty_like zeros_like ones_like full_like new_empty new_zeros new_ones "
    "new_full zero zero_ empty_strided repeat flip roll select_backward slice_backward select_scatter slice_scatter "
    "as_strided_scatter diagonal_scatter new_empty_strided lift_fresh_copy".split()
)


class LackedDtypeError(AssertionError):
    """An operator computed in, or made, a dtype that the device lacks."""


@dataclasses.dataclass(frozen=True)
class Lacking:
    """A device of type `cpu` that computes in, and stores, less than the CPU.

    Attributes:
        uncomputed: dtypes that it only stores.
        unstored: dtypes that it does not have at all.
    """

    uncomputed: tuple[torch.dtype, ...] = ()
    unstored: tuple[torch.dtype, ...] = ()
    type: str = "cpu"
    lowerings: tuple[str, ...] = ("eager",)

    def is_available(self) -> bool:
        return True

    def unavailable_reason(self) -> str:
        return ""

    def capabilities(self) -> Capabilities:
        stored = [d for d in (*FLOATS, *COMPLEX, *INTEGERS, torch.bool) if d not in self.unstored]
        computed = [d for d in stored if d in FLOATS + COMPLEX and d not in self.uncomputed]
        return Capabilities(
            compute_dtypes=tuple(computed),
            storage_dtypes=tuple(stored),
            exhaustive=True,
            device_count=1,
            name="lacking",
        )

    def synchronize(self) -> None:
        pass

    def memory(self) -> dict[str, int]:
        return {}


class Checking(TorchDispatchMode):
    """Raises where an ATen operator computes in, or makes, what the device lacks.

    What can only be stored may be moved and cast. What can't be stored may be cast from, as from an input of the host,
    and cast to where the program's own input has it: its gradient, or what it is changed to. The indices of operators
    that know no other dtype than int64 may go between such operators and casts, and nowhere else.
    """

    def __init__(self, device: Lacking, host: Iterable[torch.dtype] = ()) -> None:
        super().__init__()
        self.device, self.host = device, frozenset(host)
        self.computed: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        full = func._schema.name.rpartition("::")[2]
        name = full.removesuffix("_")
        read = {v.dtype for v in tree_leaves((args, kwargs or {})) if isinstance(v, torch.Tensor)}
        made = {v.dtype for v in tree_leaves(result) if isinstance(v, torch.Tensor)}
        casts, views = full in _CASTS, full in _VIEWS
        moves = casts or full in _MOVES
        if not moves:
            self.computed |= read | made
        for dtype in read | made:
            if dtype in self.device.uncomputed and not moves:
                raise LackedDtypeError(f"{func} computes in {dtype}")
            if dtype not in self.device.unstored:
                continue
            if dtype in INTEGERS and (casts or views or name in _INDICES):
                continue
            if casts and (dtype not in made or dtype in self.host):
                continue
            if moves and dtype in self.host:
                continue  # a gradient of the host's on its way
            raise LackedDtypeError(f"{func} reads {read} and makes {made}: {dtype} is not there")
        return result


class Backend:
    """Legalises each graph for a device, and runs it under `Checking`, the backward included."""

    def __init__(
        self,
        device: Lacking,
        *,
        training: bool = False,
        policy: str = "warn",
        host: Sequence[torch.dtype] = (),
        passes: Sequence[Any] | None = None,
    ) -> None:
        self.device, self.host, self.mode = device, host, policy
        self.passes = passes or (Legalise(mode=policy, log=False),) * 2
        self.context = PassContext(
            graph_id="g0",
            device=device,
            timeline=Timeline(),
            training=training,
        )
        self.graphs: list[GraphModule] = []
        self.computed: set[torch.dtype] = set()
        self.modified = False

    def __call__(self, module: GraphModule, inputs: Any) -> Any:
        self.modified |= run_pipeline(self.passes, module, self.context, check=True)
        self.graphs.append(module)

        def build(part: GraphModule, part_inputs: Any, **kwargs: Any) -> Any:
            def call(values: Any) -> Any:
                with Checking(self.device, self.host) as checking:
                    results = part.forward(*values)
                self.computed |= checking.computed
                return results

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        with contextlib.ExitStack() as stack:
            for make in self.context.traced_under:
                stack.enter_context(make())
            return aot_autograd.compile_graph(module, inputs, build)

    def of(self, kind: Any) -> list[Any]:
        """The events of a type."""
        return [event for event in self.context.timeline.events() if isinstance(event, kind)]


def legalised(function: Any, device: Lacking, **kwargs: Any) -> tuple[Any, Backend]:
    """The function, compiled for the device, and the backend that did it."""
    torch.compiler.reset()
    dynamic = kwargs.pop("dynamic", None)
    backend = Backend(device, **kwargs)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), backend
