"""Which kernels are combined: those of graphs with kernels of the project's own, and what is written last by itself."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.scheduler import ForeachKernelSchedulerNode, FusedSchedulerNode, OutputNode, SchedulerNode
from torch.fx import Graph, GraphModule

from omnicomp._torch.inductor.combos import combined, grouped
from omnicomp.passes.few_rows import LINEARS


def graph(*targets: Any) -> GraphModule:
    made = Graph()
    node = made.placeholder("x")
    for target in targets:
        node = made.call_function(target, (node,))
    made.output(node)
    return GraphModule({}, made)


def node(*readers: Any, device: str = "cuda", size: tuple[int, ...] = (), reduces: bool = False) -> Any:
    made = mock.Mock(spec=SchedulerNode)
    made.node = mock.Mock(get_size=lambda: size)
    made.is_reduction.return_value, made.is_template.return_value = reduces, False
    made.get_device.return_value, made.get_nodes.return_value = torch.device(device), [made]
    made.get_outputs.return_value = [mock.Mock(users=[mock.Mock(node=each) for each in readers])]
    return made


def fused(first: Any, second: Any) -> Any:
    """Two nodes of one kernel, of which the second reads the first."""
    made = node()
    made.mock_add_spec(FusedSchedulerNode)
    first.get_outputs()[0].users.append(mock.Mock(node=second))
    made.get_nodes.return_value = [first, second]
    made.get_outputs.return_value = [*first.get_outputs(), *second.get_outputs()]
    return made


OUTPUT = mock.Mock(spec=OutputNode)


def test_what_nothing_reads_is_one_group_behind_torchs_and_reductions_are_in_none():
    ends = [node(), fused(node(), node(OUTPUT)), node(size=(64, 64))]
    others = [
        node(ends[0]),
        node(OUTPUT, ends[1]),
        node(size=(64, 65)),
        node(device="cpu"),
        fused(node(), node(ends[0])),
        fused(node(ends[0]), node()),
        mock.Mock(spec=ForeachKernelSchedulerNode, is_reduction=lambda: False),
    ]
    levels = [[others[0], others[1]], [ends[0], *others[2:4]], [ends[1], *others[4:], ends[2], node(reduces=True)]]
    found = grouped(lambda scheduler: levels, None)
    assert found == [others[:2], others[2:4], others[4:], ends]


def test_a_kernel_gets_no_more_than_a_number_of_nodes():
    levels = [[node()] for _ in range(40)]
    assert [len(group) for group in grouped(lambda scheduler: levels, None) if group] == [16, 16, 8]


def test_a_kernel_is_on_one_device_and_stream():
    first, second, aside = node(device="cuda:0"), node(device="cuda:1"), node(device="cuda:0")
    scheduler = SimpleNamespace(node_to_stream={aside: 1})
    found = grouped(lambda scheduler: [[first], [second, aside]], scheduler)
    assert found == [[], [], [first], [second], [aside]]


def test_graphs_with_kernels_of_our_own_are_combined_and_no_others():
    before = ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels
    for targets, expected in (((torch.ops.aten.sin.default,), False), ((torch.ops.aten.sin.default, LINEARS), True)):
        with combined(graph(*targets)):
            assert config.combo_kernels is expected
            assert (ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels is not before) is expected
    assert config.combo_kernels is False
    assert ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels is before


def test_what_the_user_configured_stays():
    before = ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels
    with config.patch(combo_kernels=True, combo_kernels_autotune=1), combined(graph(LINEARS)):
        assert config.combo_kernels_autotune == 1
        assert ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels is before
