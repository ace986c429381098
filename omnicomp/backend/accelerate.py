"""The name `omni` in accelerate, and so in transformers' Trainer, which take the backends of a fixed list alone.

`import omnicomp.backend.accelerate` adds it: `TrainingArguments(torch_compile=True, torch_compile_backend="omni")` and
`TorchDynamoPlugin(backend="omni")` work behind it, whether accelerate was imported before or is later. `omnicomp run`
imports this module. `python -m omnicomp.backend.accelerate launch --dynamo_backend omni train.py` launches scripts
without the import as `accelerate launch` does. docs/upstream has the change to accelerate that would make all of it
needless.
"""

import importlib
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

NAME: Final = "OMNI"


def _extend_enumeration(module: ModuleType) -> None:
    listed: Any = module.DynamoBackend
    if NAME not in listed.__members__:
        member = str.__new__(listed, NAME)
        member._name_ = member._value_ = NAME
        type.__setattr__(listed, NAME, member)
        listed._member_names_.append(NAME)
        listed._member_map_[NAME] = listed._value2member_map_[NAME] = member


def _extend_choices(module: ModuleType) -> None:
    names: list[str] = module.DYNAMO_BACKENDS
    if NAME not in names:
        names.append(NAME)


_LISTS: Final[dict[str, Callable[[ModuleType], None]]] = {
    "accelerate.utils.dataclasses": _extend_enumeration,
    "accelerate.commands.config.config_utils": _extend_choices,
}
"""Modules of accelerate that name the backends, and what adds omni to each."""


class _Finder:
    """Extends a list of accelerate when the program imports its module; importing accelerate here takes seconds."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        extend = _LISTS.get(name)
        spec = None if extend is None else PathFinder.find_spec(name, path, target)
        if extend is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            extend(module)

        spec.loader.exec_module = executed
        return spec


def register() -> None:
    """Add the name to accelerate's lists of backends, at once or when accelerate is imported."""
    for name, extend in _LISTS.items():
        if name in sys.modules:
            extend(sys.modules[name])
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)  # a class with this static method is a finder


def main(words: Sequence[str]) -> None:
    """`launch …` as `accelerate launch …`; each process that it starts comes back here with `run`.

    Raises:
        SystemExit: the command is none of the two, or an argument is wrong.
    """
    command, rest = (words[0], list(words[1:])) if words else ("", [])
    if command == "launch":
        launching: Any = importlib.import_module("accelerate.commands.launch")
        args = launching.launch_command_parser().parse_args(rest)
        if not args.no_python:
            own = ["run", *(["-m"] if args.module else []), args.training_script]
            args.training_script, args.module = __spec__.name if __spec__ else __name__, True
            args.training_script_args = [*own, *args.training_script_args]
        launching.launch_command(args)
    elif command == "run" and rest:
        module = rest[0] == "-m"
        sys.argv[:] = rest[module:]
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        raise SystemExit("use: python -m omnicomp.backend.accelerate launch [options of accelerate launch] train.py")


register()

if __name__ == "__main__":
    main(sys.argv[1:])
