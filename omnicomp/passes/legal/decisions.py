"""What the pass `legalise` decided, node by node, and how it is told: events, one log line a graph, errors."""

import dataclasses
from typing import Final

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import module_path, op_name, source_line
from omnicomp.errors import LegaliseError
from omnicomp.passes.attention.nodes import kind
from omnicomp.passes.base import PassContext
from omnicomp.passes.legal.dtypes import explain, short
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger
from omnicomp.timeline import Reason

log = logger("omnicomp")

LEVER: Final = "cast to a dtype that the device has, or run this part on a device that has it"
_NAMES: Final = 8  # of nodes, in one event
_said: set[tuple[str, str]] = set()
_lock = new_lock()


@dataclasses.dataclass(kw_only=True)
class _Group:
    """Decisions that differ in their node alone."""

    first: Node
    source: torch.dtype
    target: torch.dtype
    stored: bool
    note: str
    nodes: list[str] = dataclasses.field(default_factory=list[str])


class Decisions:
    """The decisions of one region."""

    def __init__(self, name: str, context: PassContext, *, strict: bool = False, log: bool = True) -> None:
        """Start without any."""
        self.name = name
        self.context = context
        self.strict = strict
        self._logs = log
        self._groups: dict[tuple[object, ...], _Group] = {}
        self._warnings: list[str] = []

    def chosen(self, node: Node, source: torch.dtype, target: torch.dtype, *, stored: bool, note: str = "") -> None:
        """`node` computes in `target` where the program has `source`."""
        key = (op_name(node), source, target, stored, note, source_line(node), module_path(node))
        group = self._groups.setdefault(key, _Group(first=node, source=source, target=target, stored=stored, note=note))
        if node.name not in group.nodes:
            group.nodes.append(node.name)

    def may_lose(self, node: Node, source: torch.dtype, target: torch.dtype, what: str) -> None:
        """The range of a value isn't proved to fit: an error if `strict`, or else a warning.

        Raises:
            LegaliseError: it is strict.
        """
        if self.strict:
            raise self.error(node, source, f"{short(target)} in its place could lose range: {what}")
        self._warnings.append(f"{_place(node)}: {short(source)} -> {short(target)}: {what}")

    def error(self, node: Node, dtype: torch.dtype, why: str) -> LegaliseError:
        """The sentence for a node that can't be legalised."""
        device = self.context.device.type
        lever = f"{LEVER}, or set options={{'legalise': 'warn'}}" if self.strict else LEVER
        return LegaliseError(
            f"{_place(node)} needs {short(dtype)}, which the {device} device lacks, and {why}; {lever}"
        )

    def refused(self, node: Node, dtype: torch.dtype, why: str) -> None:
        """An operator that doesn't take another dtype is left as it was; the device will answer for it.

        Raises:
            LegaliseError: it is strict.
        """
        if self.strict:
            raise self.error(node, dtype, why)
        reason = Reason(
            code="dtype_refused",
            sentence=f"the operator needs {short(dtype)}, which the device lacks, and {why}",
            by=self.name,
            observed=f"dtype={short(dtype)}",
            node=f"{node.name} ({op_name(node)})",
            source=source_line(node),
            lever=LEVER,
        )
        self.context.near_miss(self.name, "legalise", node, reason)
        self._warnings.append(f"{_place(node)}: {reason.sentence}")

    def report(self) -> None:
        """Append the events, and log what happened, once a graph."""
        for group in self._groups.values():
            detail = f"{kind(group.first) or op_name(group.first)} {short(group.source)} -> {short(group.target)}"
            if len(group.nodes) > 1:
                more = ", …" if len(group.nodes) > _NAMES else ""
                detail += f" ({len(group.nodes)} nodes: {', '.join(group.nodes[:_NAMES])}{more})"
            detail += f": {explain(group.source, group.target, stored=group.stored)}"
            if group.note:
                detail += f"; {group.note}"
            self.context.rewrite(self.name, "legalise", group.first, target=short(group.target), detail=detail)
        pairs: dict[tuple[str, str], int] = {}
        for group in self._groups.values():
            pair = (short(group.source), short(group.target))
            pairs[pair] = pairs.get(pair, 0) + len(group.nodes)
        if pairs:
            text = ", ".join(f"{count} from {source} to {target}" for (source, target), count in pairs.items())
            self._log(f"the {self.context.device.type} device lacks dtypes of the graph, and operators moved: {text}")
        for warning in self._warnings:
            self._log(warning)

    def _log(self, text: str) -> None:
        graph = self.context.graph_id
        if not self._logs:
            return
        with _lock:
            if (graph, text) in _said:
                return
            _said.add((graph, text))
        log.warning("omni: %s: %s; omnicomp.audit() has the whole story", graph, text)


def _place(node: Node) -> str:
    source = source_line(node)
    return f"{node.name} ({op_name(node)}){f' at {source}' if source else ''}"
