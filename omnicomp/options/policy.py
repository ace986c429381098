"""What the user may ask for: `Policy`, made once from `torch.compile(..., mode=..., options=...)` and validated.

A key of `options` is either one of omnicomp's own (the fields of `Policy`) or one of Inductor's config keys, which is
passed through with the meaning that `backend="inductor"` gives it.
"""

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from omnicomp._torch.inductor import compile_fx as inductor
from omnicomp.devices import resolve_device
from omnicomp.errors import DeviceError, EngineError, OptionError, OverrideError
from omnicomp.options.dtype_policy import PRESETS, DtypePolicy, parse_dtype_policy
from omnicomp.options.engine_names import engine_names
from omnicomp.options.fallback_limits import FallbackBudget, parse_budget
from omnicomp.options.placement_rules import Rule, parse_environment, parse_rules
from omnicomp.timeline.privacy import PATHS, PATHS_VARIABLE
from omnicomp.timeline.sinks.jsonl import LIMIT_VARIABLE, parse_size

__all__ = ["LOWERINGS", "MODES", "OWN_OPTIONS", "Policy", "parse"]

LOWERINGS: Final = ("override", "inductor", "eager")
"""The default order. Names of engines may be put into it."""
CHOOSE: Final = ("tuned", "measure")
MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
ON_ERROR: Final = ("retreat", "raise", "retry")
VERIFY: Final = ("off", "overrides", "first", "always")
REFERENCES: Final = ("fp32", "fp64")
VERDICTS: Final = ("use", "forget", "off")
LEGALISE: Final = ("warn", "error", "off")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The validated options of one `torch.compile` call.

    Attributes:
        dtype_policy: in which dtype what is computed (`omnicomp.DtypePolicy`).
        dtype_error: how far off the outputs may be because of it, relative to their norm; None for no bound.
        dtype_sample: gives the inputs to measure that on in place of the first call's, given names and inputs.
        lowerings: the lowerings to ask, in order; `eager` is asked last in any case.
        choose: whether the lowerings of a graph are chosen by rule (`tuned`) or by measuring (`measure`), for which the
            option `lowerings` takes these words; `off` where it gives an order.
        rules: other orders for some operators, modules, nodes or subgraphs; of the option `lowerings` where that is a
            mapping, and of the environment variable `OMNICOMP_PLACE`.
        engines: options of clustering (`omnicomp.lowerings.engines.Clustering`) by the name of an engine.
        disable_passes: names of passes to skip.
        disable_overrides: names of overrides to skip.
        overrides: names of the only overrides to use; None for all that are registered.
        candidates: the only ones to measure, with `lowerings="measure"`: names of engines, `inductor`, `eager`, and the
            other names that the audit shows; the first is what the others are compared with. None for all that are
            there.
        measure_seconds: how long two candidates are timed against each other at most, with `lowerings="measure"`.
        on_error: `retreat` to the next lowering when one fails to build or raises in a call; `retry` a failed call once
            before that; or `raise`.
        max_builds: how many builds may be spent on finding the nodes that make a lowering fail.
        build_seconds: how long Inductor may take to build a part of a graph; None for no bound.
        speculate: whether a variant may be compiled for inputs that can't be proved, only checked at each call, such as
            a padding mask that is full.
        device: `auto`, or the device type to choose passes and lowerings for.
        timeline: path of a JSON Lines file to write, with `%p` and `%r`; None for the environment's.
        timeline_max_bytes: of that file, and of the one that it is rotated to; None for the environment's.
        progress: whether long compilations may show a line on the terminal.
        ranges: whether calls of subgraphs are named ranges for profilers.
        summary: whether to log one line for each compiled graph of which a part fell back.
        check_passes: whether each pass' result is checked by running the graph on fake tensors.
        verify: what is compared with eager in a higher precision on real inputs: `overrides`, when they are first used
            with a combination of dtypes and shape class; beside these all subgraphs in their `first` call, or
            `always`; or nothing, with `off`.
        reference: the precision of that, `fp32` or `fp64`.
        verdicts: whether what earlier processes found Inductor to fail on is put to `use`, is to be found out again
            (`forget`), or is neither read nor kept (`off`).
        memory: whether the device's memory is sampled around each call of a subgraph.
        timing: whether the calls of each subgraph are timed; the device is waited for before and after each.
        fallback: how much may fall back to eager; None for no bound.
        legalise: what is done about dtypes that the device lacks: the nearest is computed in, and `warn` says so;
            `error` if a range could be lost; or nothing, with `off`.
        mode: torch.compile's mode.
        inductor: Inductor's config patches, those of the mode included.
    """

    dtype_policy: DtypePolicy = PRESETS["keep"]
    dtype_error: float | None = None
    dtype_sample: Callable[..., Any] | None = None
    lowerings: tuple[str, ...] = LOWERINGS
    choose: str = "off"
    rules: tuple[Rule, ...] = ()
    engines: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict[str, Mapping[str, Any]])
    disable_passes: tuple[str, ...] = ()
    disable_overrides: tuple[str, ...] = ()
    overrides: tuple[str, ...] | None = None
    candidates: tuple[str, ...] | None = None
    measure_seconds: float = 5.0
    on_error: str = "retreat"
    max_builds: int = 24
    build_seconds: float | None = None
    speculate: bool = True
    device: str = "auto"
    timeline: str | None = None
    timeline_max_bytes: int | None = None
    progress: bool = True
    ranges: bool = False
    summary: bool = True
    check_passes: bool = False
    verify: str = "overrides"
    reference: str = "fp64"
    verdicts: str = "use"
    memory: bool = False
    timing: bool = False
    fallback: FallbackBudget | None = None
    legalise: str = "warn"
    mode: str = "default"
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def digest_parts(self) -> dict[str, Any]:
        """The fields that change generated code, for the compile caches' keys; Inductor's keys are there already."""
        ignored = {"timeline", "summary", "check_passes", "verify", "reference", "inductor", "mode", "max_builds"}
        ignored |= {"on_error", "speculate", "verdicts", "dtype_sample", "build_seconds", "memory", "measure_seconds"}
        ignored |= {"timing", "fallback"}
        ignored |= {"timeline_max_bytes", "progress", "ranges"}
        fields = (f.name for f in dataclasses.fields(self))
        parts = {name: getattr(self, name) for name in fields if name not in ignored}
        return {**parts, "dtype_policy": str(self.dtype_policy)}


_NO_OPTIONS: Final = ("mode", "inductor", "rules", "choose")
OWN_OPTIONS: Final = tuple(f.name for f in dataclasses.fields(Policy) if f.name not in _NO_OPTIONS)


def parse(mode: str | None, options: Mapping[str, Any] | None) -> Policy:
    """Validate what the user passed.

    Args:
        mode: torch.compile's mode; None means `default`.
        options: omnicomp's own keys and Inductor's config keys.

    Raises:
        OptionError: a key or a value is wrong; the message names the nearest known one.
    """
    mode = mode or "default"
    if mode not in inductor.modes():
        raise OptionError(f"unknown mode {mode!r}{_did_you_mean(mode, inductor.modes())}")
    own: dict[str, Any] = {}
    passed_on: dict[str, Any] = {}
    for key, value in (options or {}).items():
        name = str(key).replace("-", "_")
        if name in OWN_OPTIONS:
            own[name] = _CHECKS[name](name, value)
        elif name in inductor.config_keys():
            passed_on[name] = value
        else:
            known = (*OWN_OPTIONS, *inductor.config_keys())
            raise OptionError(f"unknown option {key!r}{_did_you_mean(name, known)}")
    asked = own.get("lowerings", LOWERINGS)
    own["choose"] = asked if isinstance(asked, str) else "off"
    own["lowerings"], own["rules"] = _placement(LOWERINGS if isinstance(asked, str) else asked)
    own.setdefault("check_passes", os.environ.get("OMNICOMP_CHECK_PASSES", "") not in ("", "0"))
    own.setdefault("timeline_max_bytes", parse_size(os.environ.get(LIMIT_VARIABLE, "")))
    _environment(PATHS_VARIABLE, PATHS, "absolute")
    own.setdefault("verify", _environment("OMNICOMP_VERIFY", VERIFY, "overrides"))
    own.setdefault("verdicts", _environment("OMNICOMP_VERDICTS", VERDICTS, "use"))
    try:
        patches = inductor.config_patches(mode, passed_on)
    except RuntimeError as error:
        raise OptionError(f"Inductor refuses the options: {error}") from None
    return Policy(mode=mode, inductor=patches, **own)


def _did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """The nearest known name, or a list of omnicomp's own keys where nothing is near."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if matches:
        return f'; did you mean "{matches[0]}"?'
    shown = known if len(known) <= 12 else OWN_OPTIONS
    more = "" if shown is known else ", and Inductor's config keys"
    return f"; known ones are {', '.join(shown)}{more}"


def _environment(variable: str, known: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable) or default
    if value not in known:
        raise OptionError(f"{variable} can't be {value!r}; known ones are {', '.join(known)}")
    return value


def _choice(known: tuple[str, ...]) -> Any:
    def check(name: str, value: Any) -> str:
        if value not in known:
            text = value if isinstance(value, str) else str(value).removeprefix("torch.")
            raise OptionError(f"{name} can't be {value!r}{_did_you_mean(text, known)}")
        return value

    return check


def _names(known: tuple[str, ...] | None) -> Any:
    def check(name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
            raise OptionError(f"{name} takes a list of names, not {value!r}")
        for item in value:
            if known is not None and item not in known:
                raise OptionError(f"{name} can't contain {item!r}{_did_you_mean(str(item), known)}")
        if len(set(value)) != len(value):
            raise OptionError(f"{name} names something twice: {value!r}")
        return tuple(str(item) for item in value)

    return check


def _lowerings(name: str, value: Any) -> Any:
    if isinstance(value, str) and value in CHOOSE:
        return value
    if not isinstance(value, Mapping):
        return _names(_placeable())(name, value)
    try:
        parse_rules(value, _placeable())  # type: ignore[arg-type]
    except ValueError as error:
        raise OptionError(f"{name}: {error}") from None
    return value


def _placeable() -> tuple[str, ...]:
    """What a list of lowerings may contain."""
    return (*LOWERINGS, *engine_names())


def _engines(name: str, value: Any) -> dict[str, dict[str, Any]]:
    """Options of clustering by the name of an engine, checked against the engine's own."""
    from omnicomp.lowerings.engines import resolve_engine  # it needs the policy's types

    if not isinstance(value, Mapping):
        raise OptionError(f"{name} takes a mapping of engines to their options, not {value!r}")
    for engine, values in value.items():
        if not isinstance(values, Mapping):
            raise OptionError(f"{name}: the options of {engine!r} are a mapping, not {values!r}")
        try:
            found = resolve_engine(str(engine))
            found.clustering.changed(found.name, values)
        except EngineError as error:
            raise OptionError(f"{name}: {error}") from None
    return {str(engine): dict(values) for engine, values in value.items()}


def _placement(value: Any) -> tuple[tuple[str, ...], tuple[Rule, ...]]:
    """The default order, and the rules of the option and of the environment."""
    rules = parse_rules(value, _placeable()) if isinstance(value, Mapping) else ()  # type: ignore[arg-type]
    default = LOWERINGS if isinstance(value, Mapping) else value
    try:
        rules += parse_environment(os.environ.get("OMNICOMP_PLACE", ""), _placeable())
    except ValueError as error:
        raise OptionError(f"OMNICOMP_PLACE: {error}") from None
    for index in reversed(range(len(rules))):
        if rules[index].selector == "*":  # a new default; what came before it does not count any more
            return rules[index].lowerings, rules[index + 1 :]
    return default, rules


def _overrides(name: str, value: Any) -> tuple[str, ...]:
    """Names of overrides, from names, decorated functions and import paths of modules that declare some."""
    from omnicomp.lowerings.overrides.registry import select  # it needs the policy's types

    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise OptionError(f"{name} takes a list of overrides, not {value!r}")
    try:
        return select(tuple(value))
    except OverrideError as error:
        raise OptionError(f"{name}: {error}") from error


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} takes True or False, not {value!r}")
    return value


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{name} takes a number that is not negative, not {value!r}")
    return value


def _bound(example: str) -> Any:
    def check(name: str, value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise OptionError(f"{name} takes a positive number such as {example}, not {value!r}")
        return float(value)

    return check


def _candidates(name: str, value: Any) -> tuple[str, ...] | None:
    """Names of ways to compile a graph; at least two, as one needs no measuring."""
    from omnicomp.backend.select.candidates import names  # it needs the policy's types

    if value is None:
        return None
    found = _names(names())(name, value)
    if len(found) < 2:
        raise OptionError(f"{name} takes two names or more to choose from, not {value!r}")
    return found


def _seconds(name: str, value: Any) -> float:
    found = _bound("5")(name, value)
    if found is None:
        raise OptionError(f"{name} takes a positive number of seconds such as 5, not None")
    return found


def _function(name: str, value: Any) -> Any:
    if value is not None and not (callable(value) and hasattr(value, "__qualname__")):
        raise OptionError(f"{name} takes a function of the names and values of a graph's inputs, not {value!r}")
    return value


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise OptionError(f"{name} takes the path of a file to write, not {value!r}")
    return str(os.fspath(value))


def _device(name: str, value: Any) -> str:
    if value == "auto":
        return "auto"
    try:
        return resolve_device(str(value)).type
    except DeviceError as error:
        raise OptionError(str(error)) from None


_CHECKS: Final[dict[str, Any]] = {
    "dtype_policy": lambda _, value: parse_dtype_policy(value),
    "dtype_error": _bound("1e-2"),
    "dtype_sample": _function,
    "lowerings": _lowerings,
    "engines": _engines,
    "disable_passes": _names(None),
    "disable_overrides": _names(None),
    "overrides": _overrides,
    "candidates": _candidates,
    "measure_seconds": _seconds,
    "on_error": _choice(ON_ERROR),
    "max_builds": _positive,
    "build_seconds": _bound("60"),
    "speculate": _boolean,
    "device": _device,
    "timeline": _path,
    "timeline_max_bytes": _positive,
    "progress": _boolean,
    "ranges": _boolean,
    "summary": _boolean,
    "check_passes": _boolean,
    "verify": _choice(VERIFY),
    "reference": _choice(REFERENCES),
    "verdicts": _choice(VERDICTS),
    "legalise": _choice(LEGALISE),
    "memory": _boolean,
    "timing": _boolean,
    "fallback": parse_budget,
}
