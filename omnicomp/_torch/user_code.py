"""The program's own code inside a compiled graph: its operators, and whether it raised an error.

Generated code calls operators of the program, and with them whatever Python is behind them; a dispatch mode or a tensor
subclass is called by torch's operators. An error of theirs belongs to the program. All else in a call was chosen by a
compiler: generated code, torch's operators, kernels of overrides.
"""

import linecache
import sys
import traceback
from types import FrameType
from typing import Any, Final

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.fx import all_nodes

OURS: Final = frozenset({"omnicomp", "omnicomp_override"})
"""Namespaces of the operators that stand for kernels that omnicomp chose."""

_TORCHS: Final = frozenset(
    "aten prim prims debugprims rngprims inductor inductor_prims higher_order profiler export streams static_runtime "
    "quantized _quantized quantized_decomposed quantization sparse mkl mkldnn mkldnn_prepacked onednn xnnpack onnx "
    "onnx_symbolic flex_lib _native debug_mode_ops fsdp c10d _c10d_functional _c10d_functional_autograd "
    "c10d_functional _dtensor symm_mem".split()
)
_ASSERTIONS: Final = ("aten._assert_", "aten._functional_assert_")
# Libraries that Inductor's code calls beside operators.
_COMPILERS: Final = frozenset({"torch", "omnicomp", "triton", "cutlass", "cutlass_cppgen", "helion", "halide", "jax"})
_CALLS: Final = {getattr(OpOverload, name).__code__ for name in ("__call__", "redispatch") if hasattr(OpOverload, name)}
_GENERATED: Final = "torch._inductor.runtime.compile_tasks."


def user_operators(module: GraphModule) -> tuple[str, ...]:
    """Names of the operators of a graph that are neither torch's nor omnicomp's, such as `mylib.validate`.

    What they do beside returning a result is unknown, whatever their schemas say.
    """
    found = dict.fromkeys(leaf for node in all_nodes(module) if node.op == "call_function" for leaf in _operators(node))
    names = (
        str(leaf) if isinstance(leaf, OpOverloadPacket) else str(leaf).rpartition(".")[0]
        for leaf in found
        if _is_users(leaf)
    )
    return tuple(dict.fromkeys(names))


def is_of_program(name: str) -> bool:
    """Whether Python of the program stands behind an operator, by its name: an override's is the program's, too."""
    namespace, _, rest = name.partition(".")
    return bool(rest) and namespace not in _TORCHS and namespace not in ("omnicomp", "extern_kernels")


def called_operator(node: Node) -> OpOverload | None:
    """The operator that a node of a graph after autograd calls and that is not torch's; None for others."""
    leaves = (node.target, *node.args[:1])  # what is functionalised has the operator as its first argument
    return next((each for each in leaves if isinstance(each, OpOverload) and each.namespace not in _TORCHS), None)


def modules_of_operators(module: GraphModule) -> dict[str, str]:
    """The modules that define the operators of a graph that `torch.library.custom_op` made, by the operators' names."""
    found = ((name, OPDEFS.get(name.replace(".", "::", 1))) for name in user_operators(module))
    return {name: definition._init_fn.__module__ for name, definition in found if definition is not None}


def may_raise(node: Node) -> bool:
    """Whether a node may raise an error of the program's: it calls an operator of the program, or asserts something."""
    return any(map(raises, _operators(node)))


def raises(operator: object) -> bool:
    """The same of an operator."""
    if not isinstance(operator, (OpOverload, OpOverloadPacket)):
        return False
    return _is_users(operator) or str(operator).startswith(_ASSERTIONS)


def has_effects(node: Node) -> bool:
    """Whether a node of a post-autograd graph does something that the program sees, such as printing.

    Operators of torch's that raise errors are among those that torch orders by their effects, and have none.
    """
    operator: Any = node.target
    if isinstance(operator, HigherOrderOperator) and operator.name() == "with_effects":
        operator = node.args[1]
    if isinstance(operator, HigherOrderOperator):
        return operator.name() in ("print", "call_torchbind", "invoke_leaf_function")
    return operator is torch.ops.aten._print.default


def raised_by(error: BaseException) -> str:
    """What of the program raised an error in a call of an executable: an operator, or `file:line`; else empty.

    The traceback is read from the executable on. The first operator decides that is not torch's. In Python without
    such an operator, it is the first frame behind generated code that belongs to no compiler. Where generated code
    raises by itself, it checks what the program asserted of sizes and scalars (`torch._check`).
    """
    generated = False
    for frame, line in traceback.walk_tb(error.__traceback__):
        operator = frame.f_locals.get("self") if frame.f_code in _CALLS else None
        if isinstance(operator, OpOverload):
            if str(operator).partition(".")[0] in OURS:
                return ""
            if _is_users(operator):
                return str(operator)
        elif generated and _is_python_of_user(frame):
            return f"{frame.f_code.co_filename}:{line}"
        generated = generated or _is_generated(frame)
        if _asserts(frame, line):
            return f"{frame.f_code.co_filename}:{line}"
    return ""


def has_begun(error: BaseException, operators: tuple[str, ...]) -> bool:
    """Whether some of the program's operators may have been called before generated code raised."""
    if not operators:
        return False
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_generated(frame):
            lines = linecache.getlines(frame.f_code.co_filename)[:line]
            calls = [f"torch.ops.{name}" for name in operators]
            return not lines or any(call in text for call in calls for text in lines if text.lstrip()[:1] != "#")
    return True  # it was raised in C++


def _operators(node: Node) -> list[OpOverload | OpOverloadPacket]:
    """The operators that a node calls: its target, or what is among the arguments of a higher-order operator."""
    if isinstance(node.target, OpOverload):  # no schema has an operator for an argument
        return [node.target]
    leaves = tree_leaves((node.target, node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, (OpOverload, OpOverloadPacket))]


def _is_users(operator: OpOverload | OpOverloadPacket) -> bool:
    namespace = str(operator).partition(".")[0]
    return namespace not in _TORCHS and namespace not in OURS


def _is_generated(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith(_GENERATED) or frame.f_code.co_filename.startswith("<eval_with_key>")


def _asserts(frame: FrameType, line: int) -> bool:
    return _is_generated(frame) and linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")


def _is_python_of_user(frame: FrameType) -> bool:
    module: Any = frame.f_globals.get("__name__")
    if not isinstance(module, str):  # generated by torch
        return False
    root = module.partition(".")[0]
    return root == "__main__" or (root not in _COMPILERS and root not in sys.stdlib_module_names)
