"""`omnicomp run`: a user's program as Python would run it, with its `torch.compile` calls sent to omni."""

import ast
import dataclasses
import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from omnicomp.audit import Audit, audit
from omnicomp.audit.views import VIEWS
from omnicomp.backend.options import policy_of
from omnicomp.cli import redirect
from omnicomp.cli.output import check_writable, format_of, write
from omnicomp.cli.redirect import Redirected, redirected
from omnicomp.errors import OmnicompError, OptionError
from omnicomp.escapes import one_line
from omnicomp.timeline import JsonLinesSink, current, graph_dump

__all__ = ["Program", "parse_options", "run"]

_LISTS: Final = ("lowerings", "disable_passes", "disable_overrides", "overrides")
_OWN_FILES: Final = (__file__, redirect.__file__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What to run.

    Attributes:
        target: path of a script, or name of a module.
        module: whether `target` is a module, as in `python -m`.
        arguments: its own arguments.
    """

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

    Args:
        program: what to run.
        audit_path: where the audit is written.
        timeline: where the events are written.
        dump: an empty or new folder for the graph after each stage of each compilation.
        mode: torch.compile's, for every call.
        options: of the backend, for every call.

    Returns:
        The program's exit status; 1 if it raised.

    Raises:
        OmnicompError: the program can't be found, or a path or an option is wrong; nothing has run yet.
    """
    options = dict(options or {})
    policy_of(mode, options)
    _check_program(program)
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
    found = audit()
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
            raise OptionError(f"--option takes key=value, not {item!r}")
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
        if file not in _OWN_FILES and "runpy" not in file:
            kept.append(found)
        found = found.tb_next
    for index, link in enumerate(kept):
        link.tb_next = kept[index + 1] if index + 1 < len(kept) else None
    return kept[0] if kept else None


def _summary(found: Audit, counts: Redirected) -> str:
    if found.events or counts.sent:
        return found.summary()
    kept = "" if not counts.kept else " that omni could take"
    return f"omni: nothing was compiled: the program made no torch.compile call{kept}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
