"""A first try in a process of its own, for engines whose library could take the user's process with it.

Before a native engine compiles a subgraph here for the first time on this machine, a worker compiles it and runs it
once. Weights and inputs don't travel: the worker makes up values of the same shapes, strides and dtypes, on which eager
computes without an error. If the worker dies or does not answer in time, the subgraph is refused with the reason
`engine_crashed`. What came out is kept on disk, by the content of the subgraph without its weights, the engine with its
version and options, torch and omnicomp.
"""

import contextlib
import dataclasses
import json
import logging
import os
import platform
import signal
import threading
from pathlib import Path
from typing import Any, Final

import torch

from omnicomp import store
from omnicomp._torch.dynamo.late_compile import hinted
from omnicomp._torch.inductor.graph_text import to_source
from omnicomp.analysis.exact_hash import fingerprint
from omnicomp.analysis.nodes import fake_value
from omnicomp.devices import resolve_device
from omnicomp.errors import EngineCrashedError, EngineError, EngineHungError, first_line
from omnicomp.lowerings.engines.base import Engine
from omnicomp.lowerings.engines.store import key_of
from omnicomp.lowerings.engines.subgraph import Subgraph
from omnicomp.lowerings.engines.trial_process import DiedError, HungError, NotStartedError, worker
from omnicomp.options.digest import package_digest

__all__ = ["VARIABLE", "forget", "is_wanted", "try_apart"]

log = logging.getLogger("omnicomp.engines")

VARIABLE: Final = "OMNICOMP_ENGINE_TRIAL"
"""Environment variable; `0` leaves out all trials, whatever the options say."""

# Sent by people, and by a system that is out of memory: they say nothing of the library.
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_known: Final[dict[str, "_Verdict"]] = {}
_lock: Final = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What came out: `fine`, `crashed` or `hung`, with one sentence where it isn't fine."""

    outcome: str
    sentence: str = ""


def is_wanted(engine: Engine, subgraph: Subgraph) -> bool:
    """Whether a subgraph is to be tried before an engine compiles it here."""
    return engine.native and subgraph.options.trial and os.environ.get(VARIABLE) != "0"


def try_apart(engine: Engine, subgraph: Subgraph, verdicts: str = "use") -> str:
    """Let a worker compile a subgraph and run it once, unless it is known what comes out.

    What the engine raises in the worker is no crash: the same happens here, where it becomes a reason.

    Args:
        engine: which.
        subgraph: what it is about to compile here.
        verdicts: the option of that name; with `forget` nothing is read from the disk, with `off` nothing written
            either.

    Returns:
        How it is known that it may be compiled here: `tried`, `tried before`, or `not tried: ` with a sentence.

    Raises:
        EngineCrashedError: the worker died, now or when it was tried before; `EngineHungError` if it did not answer
            within the option `trial_seconds`.
    """
    key = _key(engine, subgraph)
    with _lock:
        found = _known.get(key)
        if found is None and verdicts == "use":
            found = _read(key)
        source = "tried before"
        if found is None:
            try:
                found, last = _ask(engine, subgraph)
            except (NotStartedError, EngineError) as error:
                log.warning("a subgraph is not tried apart before %s compiles it: %s", engine.name, error)
                return f"not tried: {error}"
            source = "tried"
            if last and verdicts != "off":
                _keep(key, found)
        _known[key] = found
    if found.outcome == "hung":
        raise EngineHungError(found.sentence)
    if found.outcome != "fine":
        raise EngineCrashedError(found.sentence)
    return source


def forget() -> None:
    """Forget what this process knows; the disk is left as it is."""
    with _lock:
        _known.clear()


def _key(engine: Engine, subgraph: Subgraph) -> str:
    return key_of(
        fingerprint(list(subgraph.module.graph.nodes)),
        sorted(subgraph.constants),
        *(type(engine).__module__, type(engine).__qualname__, engine.name, engine.version(), engine.state()),
        subgraph.options,
        torch.__version__,
        package_digest(),
    )


def _ask(engine: Engine, subgraph: Subgraph) -> tuple[_Verdict, bool]:
    """What a trial says, and whether it would say so again."""
    request, seconds = _request(engine, subgraph), subgraph.options.trial_seconds
    try:
        outcome, sentence = worker.ask(request, seconds)
    except HungError:
        return _Verdict("hung", f"the process that tried it did not answer within {seconds:g} s"), True
    except DiedError as died:
        lasts = -died.code not in _FROM_OUTSIDE
        return _Verdict(
            "crashed", f"the process that tried it {_end(died.code)}{died.words and f': {died.words}'}"
        ), lasts
    if outcome == "untried":
        raise EngineError(sentence)
    if outcome == "raised":
        log.debug("%s raised where it was tried: %s", engine.name, sentence)
    return _Verdict("fine"), outcome == "fine"


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with the exit status {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def _request(engine: Engine, subgraph: Subgraph) -> dict[str, Any]:
    """What the worker needs.

    Raises:
        EngineError: it can't have it.
    """
    owner = type(engine)
    if owner.__module__ == "__main__" or "<locals>" in owner.__qualname__:
        raise EngineError(f"{owner.__qualname__} can't be imported by another process")
    inputs = [_described(fake_value(node)) for node in subgraph.placeholders]
    needed = 2 * sum(_bytes_of(value) for value in inputs if isinstance(value, dict))
    room = resolve_device(subgraph.device.type).available_memory()
    if room is not None and needed > room // 2:
        raise EngineError(f"it would take {needed >> 20} MiB, and {room >> 20} are free")
    try:
        graph = to_source(subgraph.module)
    except Exception as error:
        raise EngineError(f"the subgraph can't travel: {first_line(error)}") from error
    return {
        "module": owner.__module__,
        "class": owner.__qualname__,
        "graph": graph,
        "inputs": inputs,
        "constants": sorted(subgraph.constants),
        "device": str(subgraph.device),
        "threads": subgraph.threads,
        "options": subgraph.options,
    }


def _described(value: Any) -> Any:
    """A fake tensor as shape, strides, dtype and device; a symbolic size as that of the call that is compiled for."""
    if not isinstance(value, torch.Tensor):
        return hinted(value)
    return {
        "shape": [int(hinted(size)) for size in value.shape],
        "stride": [int(hinted(stride)) for stride in value.stride()],
        "dtype": value.dtype,
        "device": str(value.device),
    }


def _bytes_of(described: dict[str, Any]) -> int:
    count = described["dtype"].itemsize
    for size in described["shape"]:
        count *= size
    return count


def _path(key: str) -> Path:
    return store.folder() / "engine_trials" / f"{key}.json"


def _read(key: str) -> _Verdict | None:
    path = _path(key)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["outcome"] not in ("fine", "crashed", "hung"):
            raise ValueError(f"unknown outcome {data['outcome']!r}")
        found = _Verdict(data["outcome"], str(data["sentence"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("what is kept of an engine's trial can't be read, so it is tried again: %s: %s", path.name, error)
        return None
    with contextlib.suppress(OSError):  # what was used last is removed last, where the file is ours
        os.utime(path)
    return found


def _keep(key: str, verdict: _Verdict) -> None:
    data = {**dataclasses.asdict(verdict), "platform": platform.platform()}
    try:
        store.write_whole(_path(key), json.dumps(data), keep=4096)
    except OSError as error:
        log.warning("what came out of an engine's trial can't be kept: %s", error)
