"""What was measured on this machine, so that later processes build the winner without measuring again."""

import dataclasses
import hashlib
import json
import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from omnicomp import store
from omnicomp._torch.inductor.frozen import inductor_settings
from omnicomp.analysis.exact_hash import fingerprint
from omnicomp.backend.capture import CapturedGraph, graph_digest
from omnicomp.backend.select.candidates import Option
from omnicomp.options.placement_rules import Rule
from omnicomp.timeline import Candidate
from omnicomp.timeline.reading import event_from_dict

__all__ = ["Kept", "key_of", "read", "write"]

log = logging.getLogger("omnicomp.backend.select")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """The result of measuring one graph.

    Attributes:
        winner: name of the candidate.
        rules: its rules, for a candidate that was made of the measurements.
        candidates: all that were looked at.
    """

    winner: str
    rules: tuple[Rule, ...] = ()
    candidates: tuple[Candidate, ...] = ()


def key_of(gm: GraphModule, graph: CapturedGraph, options: Sequence[Option], refused: Sequence[str]) -> str:
    """Hash of everything that the result depends on: graph, options, candidates with versions, torch and the machine.

    Args:
        gm: the Dynamo graph, with fake values: shapes, strides, dtypes and devices.
        graph: its policy and device.
        options: the candidates.
        refused: names of engines that are none, here and now.
    """
    parts = (
        fingerprint([node for node in gm.graph.nodes]),
        graph_digest(graph.policy, graph.device),
        [(option.name, option.lowerings, option.version) for option in options],
        sorted(refused),
        inductor_settings(),
        torch.__version__,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        _processor(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _processor() -> str:
    """The model of the processor, as Linux tells it, or what Python knows."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")


def read(key: str) -> Kept | None:
    """What is kept under a key; None if that is nothing, or can't be read."""
    path = _path(key)
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        events = [event_from_dict(each) for each in data["candidates"]]
        return Kept(
            winner=str(data["winner"]),
            rules=tuple(Rule(str(selector), tuple(names)) for selector, names in data["rules"]),
            candidates=tuple(event for event in events if isinstance(event, Candidate)),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("what was measured can't be read from %s, and is measured again: %s", path.name, error)
        return None


def write(key: str, result: Kept) -> None:
    """Keep a result; if that fails, later processes measure again, which is logged."""
    data = {
        "winner": result.winner,
        "rules": [[rule.selector, list(rule.lowerings)] for rule in result.rules],
        "candidates": [event.to_dict() for event in result.candidates],
    }
    try:
        store.write_whole(_path(key), json.dumps(data))
    except OSError as error:
        log.warning("what was measured can't be kept, and later processes measure again: %s", error)


def _path(key: str) -> Path:
    return store.folder() / "choices" / f"{key}.json"
