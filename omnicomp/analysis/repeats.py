"""Runs of nodes that occur more than once in a graph after autograd: equal operators, arguments, shapes and data flow.

Names and values of parameters play no part: what a run reads from outside counts by its shape, strides, dtype and
device, and by whether two of its operators read the same. A run is a range in program order, so nothing is moved
(docs/adr/0004), and finding one takes time linear in the nodes.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp.analysis.hashes import node_text
from omnicomp.analysis.nodes import fake_value

_PERIODS: Final = 12  # distances that are looked at, the most frequent ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat:
    """A run of nodes and where it occurs."""

    starts: tuple[int, ...]  # positions of the first node of each occurrence, ascending; at least two
    length: int  # nodes of one

    @property
    def saved(self) -> int:
        """How many nodes need not be built, as they are built elsewhere."""
        return (len(self.starts) - 1) * self.length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What may be in a run, and where it may begin and end."""

    refused: Callable[[Node], bool]  # whether a node may not be in a run
    stops_fusion: Callable[[Node], bool]  # whether a node is code of its own, which nothing is fused across
    is_view: Callable[[Node], bool]  # whether the result of a node is in the memory of its first argument
    stays: Callable[[Node], bool] = lambda node: False  # whether a result must not be passed to or from a run
    smallest: int  # operators that a run has at least
    worth: int = 0  # operators that all but one of its occurrences have at least, together
    text: Callable[[Node], str] = node_text  # the same for operators that may be in the same place of two occurrences


def find_repeats(nodes: Sequence[Node], rules: Rules) -> list[Repeat]:
    """Find runs that do not overlap, those first that save the most.

    Args:
        nodes: the operators of a graph, in program order, with `meta["val"]`.
        rules: what may be in a run.
    """
    return _Finder(nodes, rules).find()


def _is_size(value: object) -> bool:
    """Whether a value is made of numbers alone, such as a shape."""
    return all(isinstance(each, (int, torch.SymInt)) for each in tree_leaves(value))


class _Finder:
    def __init__(self, nodes: Sequence[Node], rules: Rules) -> None:
        self._nodes = nodes
        self._rules = rules
        self._position = {node: index for index, node in enumerate(nodes)}
        self._labels = self._labelled()
        self._cuts = self._clean_cuts()

    def find(self) -> list[Repeat]:
        found: list[Repeat] = []
        while True:
            best = max(self._candidates(), key=lambda repeat: repeat.saved, default=None)
            if best is None or best.saved < self._rules.worth:
                return found
            found.append(best)
            for start in best.starts:
                for index in range(start, start + best.length):
                    self._labels[index] = -1 - index  # equal to no other

    def _labelled(self) -> list[int]:
        """A number for each node: the same for operators that differ only in where their inputs come from."""
        numbers: dict[str, int] = {}
        return [
            -1 - index if self._rules.refused(node) else numbers.setdefault(self._rules.text(node), len(numbers))
            for index, node in enumerate(self._nodes)
        ]

    def _clean_cuts(self) -> list[bool]:
        """Whether the graph can be cut in front of each node without a fusion that is lost.

        Operators are fused if no operator that stops fusion is between them. So each gets a level: how many of those
        are on the longest way to it. A cut is clean if no value is read behind it on the level that it was made on.
        """
        level: dict[Node, int] = {}
        lost = [0] * (len(self._nodes) + 1)
        origin: dict[Node, Node] = {}
        for index, node in enumerate(self._nodes):
            sources = [origin.get(source, source) for source in node.all_input_nodes]
            stops = self._rules.stops_fusion(node)
            level[node] = max((level.get(source, 0) for source in sources), default=0) + stops
            if self._rules.is_view(node) or _is_size(fake_value(node)):
                origin[node] = sources[0] if sources else node
                continue
            for source in sources:
                begin = self._position.get(source)
                if begin is not None and not stops and level[source] == level[node]:
                    lost[begin + 1] += 1
                    lost[index + 1] -= 1
        values = [fake_value(node) for node in self._nodes]
        for index, node in enumerate(self._nodes):
            # Results of several tensors are taken apart where they are made.
            is_one = isinstance(values[index], torch.Tensor) or _is_size(values[index])
            if not is_one or self._rules.stays(node):
                last = max((self._position.get(user, index) for user in node.users), default=index)
                lost[index + 1] += 1
                lost[last + 1] -= 1
        return [each == 0 for each in itertools.accumulate(lost)]

    def _candidates(self) -> list[Repeat]:
        """The best run for each of the most frequent distances of equal nodes."""
        places: defaultdict[int, list[int]] = defaultdict(list)
        for index, label in enumerate(self._labels):
            if label >= 0:
                places[label].append(index)
        distances = Counter(b - a for where in places.values() for a, b in itertools.pairwise(where))
        found: list[Repeat] = []
        # An operator that occurs several times in a run is nearer to its neighbour in the same one.
        likely = {distance for distance, _ in distances.most_common(_PERIODS)}
        wide = Counter({distance: count * distance for distance, count in distances.items()})
        likely |= {distance for distance, _ in wide.most_common(_PERIODS)}
        for distance in likely:
            for begin, end in self._matching(distance):
                window = self._window(begin, end, distance)
                if window is not None:
                    repeat = self._occurrences(*window, places)
                    if repeat is not None:
                        found.append(repeat)
        return found

    def _matching(self, distance: int) -> list[tuple[int, int]]:
        """Ranges in which each node equals the one at that distance behind it."""
        labels, ranges, begin = self._labels, list[tuple[int, int]](), -1
        for index in range(len(labels) - distance + 1):
            equal = index + distance < len(labels) and labels[index] >= 0 and labels[index] == labels[index + distance]
            if equal and begin < 0:
                begin = index
            elif not equal and begin >= 0:
                if index - begin >= self._rules.smallest:
                    ranges.append((begin, index))
                begin = -1
        return ranges

    def _window(self, begin: int, end: int, distance: int) -> tuple[int, int] | None:
        """Start and length of a run in a range, with clean cuts on both sides."""
        if end - begin >= distance:  # neighbours: the run has that length, and may begin anywhere in the first
            if distance < self._rules.smallest:
                return None
            last = min(begin + distance, end)
            start = next((i for i in range(begin, last) if self._cuts[i] and self._cuts[i + distance]), None)
            return None if start is None else (start, distance)
        clean = [i for i in range(begin, end + 1) if self._cuts[i] and self._cuts[i + distance]]
        if not clean or clean[-1] - clean[0] < self._rules.smallest:
            return None
        return clean[0], clean[-1] - clean[0]

    def _occurrences(self, start: int, length: int, places: Mapping[int, Sequence[int]]) -> Repeat | None:
        """All places where a run occurs with the same data flow, as far as they do not overlap."""
        labels = self._labels[start : start + length]
        flow = self._flow(start, length)
        starts: list[int] = []
        for index in places[labels[0]]:
            if starts and index < starts[-1] + length:
                continue
            if not (index + length <= len(self._nodes) and self._cuts[index] and self._cuts[index + length]):
                continue
            if self._labels[index : index + length] == labels and self._flow(index, length) == flow:
                starts.append(index)
        return Repeat(starts=tuple(starts), length=length) if len(starts) > 1 else None

    def _flow(self, start: int, length: int) -> list[int]:
        """For each operand of each node: its distance if it is in the run, or its number among those from outside."""
        flow: list[int] = []
        outside: dict[Node, int] = {}
        for index in range(start, start + length):
            for source in self._nodes[index].all_input_nodes:
                position = self._position.get(source, -1)
                inside = start <= position < index
                flow.append(index - position if inside else -1 - outside.setdefault(source, len(outside)))
        return flow
