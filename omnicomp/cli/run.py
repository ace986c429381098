"""Redirects a program's `torch.compile` calls to omni, for `omnicomp run`."""

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from omnicomp._torch.dynamo.registrations import backend_names, default_backend, lookup_backend, settle_dynamo
from omnicomp.audit import Audit
from omnicomp.audit.source import of_this_process
from omnicomp.audit.views import VIEWS
from omnicomp.backend.accelerate import register
from omnicomp.backend.options import policy_of
from omnicomp.cli.output import check_writable, format_of, write
from omnicomp.errors import OmnicompError, OptionError, wrong_value
from omnicomp.safety.escapes import one_line
from omnicomp.timeline import JsonLinesSink, current, graph_dump


@dataclasses.dataclass(kw_only=True)
class Redirected:
    """What happened to the calls."""

    sent: int = 0
    kept: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True)
class _Both:
    """The backend with a mode and options together, which `torch.compile` itself refuses to take.

    Equal ones are equal, because Dynamo compiles anew for another backend.
    """

    mode: str
    options: tuple[tuple[str, str], ...]
    values: Mapping[str, Any] = dataclasses.field(compare=False)

    def __call__(self, gm: Any, inputs: Any) -> Any:
        return lookup_backend(_name())(gm, inputs, mode=self.mode, options=self.values)  # type: ignore[call-arg]


@contextlib.contextmanager
def redirected(mode: str | None, options: Mapping[str, Any]) -> Generator[Redirected]:
    """Replace `torch.compile` until the block ends.

    A call that names no backend, or Inductor, gets omni; any other backend is left and counted. `nn.Module.compile`
    and the decorator forms call `torch.compile` and need nothing of their own. Libraries that took the function before
    (`from torch import compile`) keep the original.
    """
    settle_dynamo()
    original = torch.compile
    counts = Redirected()

    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Dynamo traces a call inside compiled code and inlines what it compiles: it must see its own function.
            return original(model, **kwargs)
        if model is None:
            # torch's own decorator form would come back here, with the backend set already.
            return functools.partial(compile, **kwargs)
        backend = kwargs.get("backend")
        backend = default_backend() if backend is None else backend
        if isinstance(backend, str) and backend in ("inductor", "omni"):
            counts.sent += 1
            kwargs.update(_arguments(kwargs, mode, options))
        else:
            name = backend if isinstance(backend, str) else getattr(backend, "__qualname__", repr(backend))
            counts.kept[name] = counts.kept.get(name, 0) + 1
        return original(model, **kwargs)

    torch.compile = compile  # type: ignore[assignment]
    try:
        yield counts
    finally:
        torch.compile = original


def _arguments(kwargs: Mapping[str, Any], mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Backend, mode and options of a redirected call."""
    own = kwargs.get("options")
    own_mode = kwargs.get("mode")
    if own is not None and own_mode is not None and mode is None:
        # torch.compile refuses this call under any backend: the user is to see the error that it always gave.
        return {"backend": _name()}
    merged = {**(own or {}), **options}
    chosen = mode if mode is not None else own_mode
    if not merged:
        return {"backend": _name(), "mode": chosen, "options": None}
    if chosen is None or chosen == "default":
        return {"backend": _name(), "mode": None, "options": merged}
    # torch.compile takes these two out of the options itself; they never reach a backend.
    own_keys = {key: merged.pop(key) for key in ("guard_filter_fn", "use_aoti") if key in merged} or None
    values = tuple(sorted((key, repr(value)) for key, value in merged.items()))
    return {"backend": _Both(chosen, values, merged), "mode": None, "options": own_keys}


def _name() -> Any:
    """The backend by name; the function itself where omnicomp runs from a checkout that was never installed."""
    if "omni" in backend_names():
        return "omni"
    from omnicomp.backend.pipeline import omni

    return omni


_LISTS: Final = ("lowerings", "passes", "disable_passes", "disable_overrides", "overrides")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What to run."""

    target: str
    module: bool = False
    arguments: tuple[str, ...] = ()


def run(
    program: Program,
    *,
    audit_path: Path | None = None,
    timeline: str | None = None,
    dump: Path | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> int:
    """Run the program, then write the audit and print its summary to stderr, also if the program failed.

    Returns:
        The program's exit status; 1 if it raised.

    Raises:
        OmnicompError: the program can't be found, or a path or an option is wrong; nothing has run yet.
    """
    options = dict(options or {})
    policy_of(mode, options)
    _check_program(program)
    register()
    if audit_path is not None:
        format_of(audit_path)
        check_writable(audit_path)
    if timeline is not None:
        _add_timeline(timeline)
    if dump is not None:
        _prepare(dump)
        graph_dump.write_to(dump)
    try:
        with redirected(mode, options) as counts:
            code = _execute(program)
    finally:
        graph_dump.write_to(None)
    found = of_this_process(current().events(), ended=True)
    sys.stdout.flush()
    for name, calls in counts.kept.items():
        times = f"{calls} torch.compile call{'s' if calls > 1 else ''}"
        _say(f"omnicomp: note: {times} named the backend {name!r} and kept it")
    _say(one_line(_summary(found, counts)))
    if audit_path is not None:
        write(audit_path, VIEWS[format_of(audit_path)](found))
    return code


def parse_options(items: Sequence[str]) -> dict[str, Any]:
    """Turn `key=value` words into options: Python literals, `true` and `false`, lists by comma, and else text.

    Raises:
        OptionError: a word has no `=`.
    """
    options: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise wrong_value("--option", item, "KEY=VALUE", example="dtype_policy=bf16")
        options[key] = _value(key.replace("-", "_"), text)
    return options


def _value(key: str, text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text  # a plain word needs no quotes on a command line
    if key in _LISTS and isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return value


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OmnicompError(f"the folder {folder} can't be made ({error.strerror}); name another one") from None
    if any(folder.iterdir()):
        raise OmnicompError(f"the folder {folder} is not empty; name a new one for the graphs")


def _add_timeline(path: str) -> None:
    try:
        sink = JsonLinesSink(path)
    except OptionError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        said = getattr(error, "strerror", None) or error
        raise OmnicompError(f"the timeline {path} can't be written ({said}); name another path") from None
    current().add_sink(path, sink)
    current().begin()


def _check_program(program: Program) -> None:
    if not program.module:
        if not os.path.exists(program.target):
            raise OmnicompError(f"there is no script {program.target}; give the path of a Python file")
        if not os.access(program.target, os.R_OK):
            raise OmnicompError(f"the script {program.target} can't be read; check its permissions")
        return
    # The top-level name alone: finding a submodule would import its parents before the program starts.
    name = program.target.split(".", 1)[0]
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name) if name else None
    except ValueError:
        found = None  # a module without a spec, such as __main__, can't be run by name
    finally:
        sys.path.pop(0)
    if found is None:
        raise OmnicompError(f"there is no module {program.target}; give the name of a module that can be imported")


def _execute(program: Program) -> int:
    """Run the program with `sys.argv`, `sys.path` and `__main__` as Python sets them, and restore them after."""
    argv, path = sys.argv[:], sys.path[:]
    folder = os.getcwd() if program.module else os.path.dirname(os.path.abspath(program.target))
    sys.argv[:] = [program.target, *program.arguments]
    # Python's own first entry is the folder of the omnicomp command, or the current one under `python -m`.
    sys.path[:1] = [folder]
    try:
        if program.module:
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program.target, run_name="__main__")
    except SystemExit as stop:
        return _status(stop.code)
    except KeyboardInterrupt as error:
        _show(error)
        return 130
    except BaseException as error:  # noqa: BLE001 - the program's own; shown as Python would show it
        _show(error)
        return 1
    finally:
        sys.argv[:], sys.path[:] = argv, path
    return 0


def _status(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    _say(str(code))
    return 1


def _show(error: BaseException) -> None:
    """Print a traceback without the frames that are only there because omnicomp runs the program."""
    sys.stdout.flush()
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = _own_frames_removed(link.__traceback__)
        pending += [link.__cause__, link.__context__]
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(type(error), error, error.__traceback__)
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def _own_frames_removed(found: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while found is not None:
        file = found.tb_frame.f_code.co_filename
        if file != __file__ and "runpy" not in file:
            kept.append(found)
        found = found.tb_next
    for index, link in enumerate(kept):
        link.tb_next = kept[index + 1] if index + 1 < len(kept) else None
    return kept[0] if kept else None


def _summary(found: Audit, counts: Redirected) -> str:
    if found.events:
        return found.summary()
    if counts.sent:
        calls = "a torch.compile call" if counts.sent == 1 else f"{counts.sent} torch.compile calls"
        why = "what it made was not called, or Dynamo skipped it, which TORCH_LOGS=dynamo tells"
        return f"omni: nothing was compiled: Dynamo gave no graph for {calls}; {why}"
    kept = "" if not counts.kept else " that omni could take"
    return f"omni: nothing was compiled: the program made no torch.compile call{kept}"


def _say(line: str) -> None:
    """Print a line to stderr; in a job of several ranks with the rank, as all of them share the terminal."""
    rank = f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    print(f"{rank}{line}", file=sys.stderr, flush=True)
