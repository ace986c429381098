"""Stored results of measuring, so that later processes build the winner without measuring again."""

import platform
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule

from omnicomp import records
from omnicomp._torch.inductor.frozen import inductor_settings
from omnicomp._torch.inductor.store import JsonStore, key_of
from omnicomp.analysis.hashes import exact_hash
from omnicomp.backend.capture import CapturedGraph, graph_digest
from omnicomp.backend.select.candidates import Option
from omnicomp.devices.cpu import processor
from omnicomp.options.placement_rules import Rule
from omnicomp.timeline import Candidate
from omnicomp.timeline.files import event_from_dict


@records.dataclass(frozen=True, kw_only=True)
class Kept:
    """The result of measuring one graph."""

    winner: str
    rules: tuple[Rule, ...] = ()
    candidates: tuple[Candidate, ...] = ()


def result_key(gm: GraphModule, graph: CapturedGraph, options: Sequence[Option], refused: Sequence[str]) -> str:
    """Hash of all that the result depends on: graph, options, candidates with versions, torch and the machine."""
    return key_of(
        exact_hash(list(gm.graph.nodes)),
        graph_digest(graph.policy, graph.device),
        [(option.name, option.lowerings, option.version) for option in options],
        sorted(refused),
        inductor_settings(),
        torch.__version__,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        processor(),
    )


def _dump(result: Kept) -> dict[str, Any]:
    return {
        "winner": result.winner,
        "rules": [[rule.selector, list(rule.lowerings)] for rule in result.rules],
        "candidates": [event.to_dict() for event in result.candidates],
    }


def _load(data: Any) -> Kept:
    events = [event_from_dict(each) for each in data["candidates"]]
    return Kept(
        winner=str(data["winner"]),
        rules=tuple(Rule(str(selector), tuple(names)) for selector, names in data["rules"]),
        candidates=tuple(event for event in events if isinstance(event, Candidate)),
    )


RESULTS: Final = JsonStore[Kept]("choices", _dump, _load)
"""By the key of `result_key`; what can't be read is measured again."""
