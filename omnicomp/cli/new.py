"""`omnicomp new`: a package for a device or an engine from outside, complete, from `omnicomp/cli/templates`."""

import keyword
import re
from pathlib import Path
from string import Template
from typing import Final

import torch

from omnicomp._torch.devices import privateuse
from omnicomp.devices import device_names
from omnicomp.errors import DeviceError, EngineError, OmnicompError
from omnicomp.lowerings import LOWERINGS
from omnicomp.options.checks import engine_names

TEMPLATES: Final = Path(__file__).parent / "templates" / "device"
ENGINE_TEMPLATES: Final = TEMPLATES.with_name("engine")
_SUFFIX: Final = ".in"


def check_name(name: str) -> None:
    """Check that a name can become a device type.

    Raises:
        DeviceError: it is no word of letters that torch's parser of devices takes; or torch, omnicomp or Python has
            something of that name already.
    """
    if not re.fullmatch(r"[a-z][a-z_]*", name) or keyword.iskeyword(name):
        raise DeviceError(
            f"a device type is a word of lower-case letters and underscores, as torch has it, not {name!r}"
        )
    if name in ("auto", "privateuseone") or name in device_names() or privateuse.is_known(name):
        raise DeviceError(f"there already is a device type {name!r}; choose another name")
    for owner in (torch, torch.Tensor, torch.nn.Module):
        if hasattr(owner, name):
            where = "torch" if owner is torch else f"torch.{owner.__name__}"
            raise DeviceError(f"{where}.{name} is something else already, and a device needs that name; choose another")


def check_engine_name(name: str) -> None:
    """Check that a name can become an engine's.

    Raises:
        EngineError: it is no word that a package can be called by, or a lowering has it already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise EngineError(
            f"the name of an engine is a word of lower-case letters, digits and underscores, not {name!r}"
        )
    if name in (*LOWERINGS, *engine_names()):
        raise EngineError(f"there already is a lowering {name!r}; choose another name")


def write_device(name: str, folder: Path) -> list[Path]:
    """Write the package of a device into `folder/omnicomp-NAME`.

    Returns:
        The files, sorted.

    Raises:
        DeviceError: as of `check_name`.
        OmnicompError: the package's folder exists already, or can't be written.
    """
    check_name(name)
    return _write(TEMPLATES, name, folder)


def write_engine(name: str, folder: Path) -> list[Path]:
    """Write the package of an engine into `folder/omnicomp-NAME`.

    Returns:
        The files, sorted.

    Raises:
        EngineError: as of `check_engine_name`.
        OmnicompError: the package's folder exists already, or can't be written.
    """
    check_engine_name(name)
    return _write(ENGINE_TEMPLATES, name, folder)


def _write(templates: Path, name: str, folder: Path) -> list[Path]:
    target = folder / f"omnicomp-{name}"
    values = {"name": name, "class_name": "".join(part.capitalize() for part in name.split("_"))}
    written: list[Path] = []
    try:
        target.mkdir(parents=True)
        for source in sorted(templates.rglob(f"*{_SUFFIX}")):
            parts = source.relative_to(templates).with_suffix("").parts
            if parts[0] == "package":
                parts = (f"omnicomp_{name}", *parts[1:])
            path = target.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(source.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
            written.append(path)
    except FileExistsError as error:
        raise OmnicompError(f"{error.filename or target} exists already; name another folder with --path") from error
    except OSError as error:
        raise OmnicompError(
            f"{target} can't be written ({error.strerror or error}); name another with --path"
        ) from error
    return sorted(written)


def next_steps(name: str, target: Path) -> str:
    """What to do with a package that was written, a command a line."""
    return "\n".join(
        (
            f"pip install --no-build-isolation -e {target}",
            f"omnicomp doctor --device {name}",
            f"omnicomp conformance {name} --quick",
            f"omnicomp bringup bert --device {name}",
        )
    )


def next_engine_steps(name: str, target: Path) -> str:
    """What to do with an engine's package that was written, a command a line."""
    return "\n".join(
        (
            f"pip install --no-deps --no-build-isolation -e {target}",
            f"pytest {target / 'tests'}",
            f"omnicomp doctor   # shows the engine {name}",
        )
    )
