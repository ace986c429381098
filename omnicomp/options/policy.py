"""What the user may ask for: `Policy`, made once from `torch.compile(..., mode=..., options=...)` and validated.

A key of `options` is either one of omnicomp's own, which `Policy` declares, or one of Inductor's config keys, which is
passed on with the meaning that `backend="inductor"` gives it.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from omnicomp._torch.inductor import compile_fx as inductor
from omnicomp.devices import resolve_device
from omnicomp.errors import DeviceError, OptionError, nearest, wrong_value
from omnicomp.options.checks import (
    Check,
    OptionSpec,
    boolean,
    bound,
    choice,
    count,
    engine_names,
    function,
    limit,
    listed,
    mapping_of_mappings,
    names,
    option,
    path,
    word,
)
from omnicomp.options.dtype_policy import PRESETS, DtypePolicy, parse_dtype_policy
from omnicomp.options.fallback_limits import FallbackBudget, parse_budget
from omnicomp.options.placement_rules import Rule, parse_environment, parse_rules
from omnicomp.safety.privacy import PATHS, PATHS_VARIABLE
from omnicomp.timeline.reasons import text_of
from omnicomp.timeline.sinks.jsonl import LIMIT_VARIABLE, parse_size

LOWERINGS: Final = ("override", "inductor", "eager")
"""The default order. Names of engines may be put into it."""
VERIFYING: Final = ("first", "always")
"""Values of the option `verify` with which results are compared with eager's."""
_EXACT: Final[dict[str, bool]] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "fallback_random": True,
    "use_joint_graph_passes": False,
    "use_post_grad_passes": False,
    "comprehensive_padding": False,
    "layout_optimization": False,
}
"""Inductor's keys for eager's rounding, random numbers and strides, and without rewrites that change values."""
_USUAL: Final = {"eager": LOWERINGS[1:], "batch-invariant": LOWERINGS[2:]}
"""The default orders of the option `numerics`."""
_CHOOSE: Final = ("tuned", "measure")
_CUDAGRAPHS: Final = ("triton.cudagraphs", "triton.cudagraph_trees", "cudagraph_policy")
"""Inductor's keys for CUDA graphs."""
_WITHOUT_EFFECT: Final = ("build_seconds",)  # for one release


def _lowerings(name: str, value: Any) -> Any:
    """A word, a list of lowerings, or rules; `parse` makes the fields `lowerings`, `choose` and `rules` of it."""
    if isinstance(value, str) and value in _CHOOSE:
        return value
    if not isinstance(value, Mapping):
        return names(_placeable())(name, value)
    try:
        parse_rules(value, _placeable())  # type: ignore[arg-type]
    except ValueError as error:
        raise OptionError(f"{name}: {error}") from None
    return value


def _placeable() -> tuple[str, ...]:
    """What a list of lowerings may contain."""
    return (*LOWERINGS, "device", *engine_names())


def _device(name: str, value: Any) -> str:
    if value == "auto":
        return "auto"
    try:
        return resolve_device(str(value)).type
    except DeviceError as error:
        raise OptionError(str(error)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The validated options of one `torch.compile` call; docs/options.md is generated from these declarations."""

    dtype_policy: DtypePolicy = option(
        PRESETS["keep"],
        lambda _, value: parse_dtype_policy(value),
        '`"bf16"` or `"fp16"`: linear layers, matmuls, convolutions and attention in that dtype, all else in float32; '
        '`"auto"`: where the device is fast in it; `"tf32"`; `"fp8"`; or an `omnicomp.DtypePolicy` with rules for '
        "operators, modules and nodes. See [dtypes.md](dtypes.md)",
    )
    dtype_error: float | None = option(
        None,
        bound("1e-2"),
        "a bound such as `1e-2` on the relative error of a graph's outputs that `dtype_policy` costs. It is measured "
        "on the first inputs, and the operators that harm most stay wide until it holds. See "
        "[dtypes.md](dtypes.md#bounded-error)",
    )
    dtype_sample: Callable[..., Any] | None = option(
        None,
        function,
        "a function of the names and the values of a graph's inputs, which returns the values to measure that on",
        in_digest=False,
    )
    numerics: str = option(
        "inductor",
        choice("inductor", "eager", "batch-invariant"),
        '`"eager"`: outputs, gradients and random numbers are eager\'s in every bit. Inductor gets the operators of '
        "which its code was seen to give eager's bits, all else runs on eager's kernels, and the first two calls of "
        'each graph are compared with eager. `"batch-invariant"`: for inference on the CPU, a row has the same bits '
        "alone and in a batch; all runs on eager's kernels, and an operator without such a form is an error. See "
        "[numerics.md](numerics.md)",
    )
    lowerings: tuple[str, ...] = option(
        LOWERINGS,
        _lowerings,
        "the lowerings to ask for each operator, in order; eager is asked last even if it is not named. A device "
        "with a compiler of its own has it (`device`) in front of `inductor`, unless it is named elsewhere. Names of "
        "engines may stand among them. "
        'A mapping gives other orders to operators, modules, nodes or subgraphs: `{"aten.topk": "eager", '
        '"layers.3.mlp": ["override", "eager"]}`; the last match decides, and `"*"` is the default for what comes '
        'after it. `"measure"` tries each way of compiling an inference graph on its first inputs, and keeps the '
        'fastest right one on this machine; `"tuned"` sets Inductor well, by rule. See [engines.md](engines.md)',
        variable="OMNICOMP_PLACE",
        read=None,
    )
    engines: Mapping[str, Mapping[str, Any]] = option(
        dict[str, Mapping[str, Any]](),
        mapping_of_mappings,
        'which subgraphs an engine gets, by its name: `{"toy": {"smallest": 4, "dynamic": "refused"}}`. See '
        "[new-engine.md](new-engine.md#which-subgraphs-it-gets)",
    )
    disable_passes: tuple[str, ...] = option(
        (),
        names(),
        "names of passes to skip: `attention_fusion`, `dtype_policy`, `few_rows`, `legalise`, or a repair such as "
        "`repair_losses`",
    )
    passes: tuple[Any, ...] | None = option(
        None,
        lambda name, value: None if value is None else listed(name, value, "passes"),
        "the only passes to run beside omnicomp's own: `omnicomp.passes.Pass` objects, and names of those that "
        "installed packages declare; without it, all that they declare. See "
        "[adding.md](adding.md#a-pass-in-another-package)",
        in_digest=False,  # `omnicomp.passes.keys` tells which they are
    )
    disable_overrides: tuple[str, ...] = option((), names(), "names of overrides to skip")
    overrides: tuple[str, ...] | None = option(
        None,
        lambda name, value: listed(name, value, "overrides"),
        "the only overrides to use: names, decorated functions, or import paths of modules that declare some",
    )
    candidates: tuple[str, ...] | None = option(
        None,
        lambda name, value: None if value is None else names(several=True)(name, value),
        'what `lowerings="measure"` tries: `["inductor", "frozen", "openvino"]`; the first is what the others are '
        "compared with",
    )
    measure_seconds: float = option(
        5.0,
        bound("5", optional=False),
        "how long two candidates are timed against each other at most",
        in_digest=False,
    )
    attention_seconds: float = option(
        2.0,
        limit("2"),
        "how long the kernels for attention may be timed while a graph is compiled for CUDA, and those for layers of "
        "few rows; what is known from before costs nothing, and what is left is chosen by rule. `0`: all is. See "
        "[attention.md](attention.md#kernels-by-measuring)",
        in_digest=False,
    )
    empty_row_gradients: bool = option(
        False,
        boolean,
        "in training on a GPU, a query from which an added finite minimum hides every key, as left padding does, "
        "passes its gradient on to queries and keys, as in eager; each attention with such a mask costs two small "
        "products more",
    )
    on_error: str = option(
        "retreat",
        choice("retreat", "raise", "retry"),
        'retreat to the next lowering when a build or a call fails; `"retry"`: repeat a failed call once before '
        'that; or `"raise"`',
        in_digest=False,
    )
    regions: str = option(
        "auto",
        choice("auto", "always", "never"),
        "regions of a graph that repeat, such as the layers of a transformer, are built once and called as often as "
        'they occur, on the CPU and on CUDA, where that saves two seconds or more and costs no fusion; `"always"`: on '
        'other devices, too, where their calls were not measured; `"never"`: each is built',
    )
    cudagraphs: str = option(
        "auto",
        choice("auto", "always", "never"),
        '`"auto"`: a compiled graph on CUDA whose replays as a CUDA graph are measured to be faster than its calls is '
        "recorded, in training its forward and its backward. What a call returns is copied, so that no later one "
        'overwrites it. `"always"`: without measuring; `"never"`: only as Inductor\'s own `triton.cudagraphs` and '
        '`mode="reduce-overhead"` do, which go before this option. With `background`, `"never"` is the default. See '
        "[ADR 23](adr/0023-cuda-graphs-by-themselves.md)",
    )
    cudagraphs_bytes: int | None = option(
        None,
        count,
        "the memory that these recordings may hold; without it, what the calls need anyway, and so much more that the "
        "process needs a tenth more than before at most, or a hundredth of the device's memory, or 256 MiB. What would "
        "hold more runs without",
        in_digest=False,
    )
    max_builds: int = option(
        24,
        count,
        "builds to spend on finding the operators that make Inductor fail",
        in_digest=False,
    )
    autograd: str = option(
        "compiled",
        choice("compiled", "eager"),
        "`eager`: graphs in training run by eager's autograd, uncompiled, for second derivatives and separate "
        "backwards that the compiled one refuses",
        in_digest=False,
    )
    speculate: bool = option(
        True,
        boolean,
        "compile for the class that the values of a mask show (full, causal, …) where that pays, check it at each "
        "call, and compile another variant when a call needs it; `False`: one variant that is right for every mask",
        in_digest=False,
    )
    background: bool = option(
        False,
        boolean,
        "calls run eager while another process builds the graph, and the compiled graph takes over between two calls; "
        "a graph that is called often is built once more for speed, and that build takes over if it is faster. "
        "`omnicomp.wait()` waits for what is being built. What can't be built so is built as without the option, with "
        "a reason. See [limits.md](limits.md)",
        in_digest=False,
        variable="OMNICOMP_BACKGROUND",
        read=lambda _, text: text != "0",
    )
    device: str = option("auto", _device, "the device type to choose passes and lowerings for")
    tag: str = option(
        "",
        word,
        "the name of what is compiled, for the [three levels](timeline.md#three-levels) of its subgraphs; "
        "`omnicomp.wrap_module` gives that of the module",
        in_digest=False,
    )
    timeline: str | None = option(
        None,
        path,
        "a JSON Lines file for the events; `%p` becomes the process id, `%r` the rank, `%h` the host",
        in_digest=False,
    )
    timeline_max_bytes: int | None = option(
        None,
        count,
        "a limit for that file and the one that it is rotated to; the variable takes `64M`",
        in_digest=False,
        variable=LIMIT_VARIABLE,
        read=lambda _, text: parse_size(text),
    )
    progress: bool = option(
        True,
        boolean,
        "a line on the terminal while a compilation takes longer than two seconds; `OMNICOMP_PROGRESS=0` switches it "
        "off. See [ecosystem.md](ecosystem.md#progress)",
        in_digest=False,
    )
    ranges: bool = option(
        False,
        boolean,
        "each call of a subgraph as a range `omni g0.forward.0 (inductor)` in torch's profiler and in Nsight",
        in_digest=False,
    )
    summary: bool = option(
        True,
        boolean,
        "log one line for each compiled graph of which a part fell back, but for what is "
        "[acknowledged](audit.md#acknowledgements)",
        in_digest=False,
    )
    certify: str = option(
        "new",
        choice("off", "new", "always"),
        "what each pass changed is checked by what knows nothing of the pass, and a place that is refuted becomes what "
        "it was; certificates are kept by the structure of the change, so that equal layers are one check, and a warm "
        "start is none. For omnicomp's own passes there is a budget of time, behind which a change is told to be "
        'unchecked; `"always"` has none, and checks in each compilation. `"off"` checks nothing. See '
        "[audit.md](audit.md#certificates)",
        in_digest=False,
        variable="OMNICOMP_CERTIFY",
    )
    check_passes: bool = option(
        False,
        boolean,
        "run the graph on fake tensors after each pass, and compare its outputs' shape, dtype and device",
        in_digest=False,
        variable="OMNICOMP_CHECK_PASSES",
        read=lambda _, text: text != "0",
    )
    verify: str = option(
        "overrides",
        choice("off", "overrides", "first", "always", "inductor"),
        "compare each override with its reference, gradients included, when it is first used with a combination of "
        "dtypes and class of shapes; a wrong one gives way to its reference and is not used again. "
        '`"first"` or `"always"`: also compare what each subgraph computes in its first call, or in each, with eager '
        "in a higher precision; one that is farther off than eager in its own dtype is replaced by eager. "
        '`"inductor"`: check what each of Inductor\'s own passes changes in a graph, as `certify` does, and leave out '
        'what is refuted; see [certificates.md](certificates.md#inductors-passes). `"off"`: compare nothing',
        in_digest=False,
        variable="OMNICOMP_VERIFY",
    )
    reference: str = option(
        "fp64", choice("fp32", "fp64"), 'the precision of that comparison, or `"fp32"`', in_digest=False
    )
    verdicts: str = option(
        "use",
        choice("use", "forget", "off"),
        "what earlier processes found to fail is cut before the first build, and what they decided of attention is "
        'done again; `"forget"`: it is found out again; `"off"`: nothing is read or stored. `OMNICOMP_CACHE_DIR` '
        "names the folder, `omnicomp bisect` lists it",
        in_digest=False,
        variable="OMNICOMP_VERDICTS",
    )
    memory: bool = option(
        False,
        boolean,
        "sample the device's memory around each call of a subgraph into the timeline (`memory` events); the device is "
        "waited for each time",
        in_digest=False,
    )
    timing: bool = option(
        False,
        boolean,
        "time the calls of each subgraph; the device is waited for before and after each. After 1, 2, 4, 8, … calls a "
        "`timing` event tells of all so far, and the audit has shares of time; on CUDA it has kernels and gaps, as "
        "torch's profiler sees them in the ninth call",
        in_digest=False,
    )
    fallback: FallbackBudget | None = option(
        None,
        parse_budget,
        'a bound on what falls back to eager: `{"max_nodes": 0, "max_flops_share": 0.01, "allow": ["aten.topk", '
        '"layers.0.*"], "on_excess": "error"}` raises an error that names the operators, lines and levers if a graph '
        'falls back more than that, when it is compiled, restored from a cache, or called; `"warn"`, the default, is '
        "one warning. See [audit.md](audit.md#a-budget)",
        in_digest=False,
    )
    ranks: str = option(
        "raise",
        choice("raise", "follow", "warn"),
        "what is done where the ranks of a distributed job compiled a graph with collectives in different ways, which "
        'is compared once, before its first call: `"raise"` an error on all of them; `"follow"`: run the part eager on '
        'all of them, if only the lowering differs, and else raise; `"warn"`: go on, and wait for no rank. See '
        "[limits.md](limits.md)",
        in_digest=False,
        variable="OMNICOMP_RANKS",
    )
    ranks_seconds: float | None = option(
        None,
        bound("60"),
        "how long a rank waits for others then; without it, as long as the process group waits in a collective",
        in_digest=False,
    )
    legalise: str = option(
        "warn",
        choice("warn", "error", "off"),
        "what is done where the device lacks a dtype: the nearest takes its place, and a warning says so; "
        '`"error"`: not where range could be lost; `"off"`: nothing. The CPU and CUDA are not concerned. See '
        "[dtypes.md](dtypes.md#what-a-device-lacks)",
    )
    # These are no options: `parse` makes them of `lowerings`, of the mode, and of Inductor's keys.
    choose: str = "off"
    rules: tuple[Rule, ...] = ()
    records: bool = True  # whether calls are recorded by `cudagraphs`, and not by Inductor's own options
    mode: str = "default"
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @property
    def certifies(self) -> bool:
        """Whether what omnicomp itself puts into a graph is checked."""
        return self.certify != "off"

    def digest_parts(self) -> dict[str, Any]:
        """The fields that change generated code, for the compile caches' keys; Inductor's keys are there already."""
        parts = {name: getattr(self, name) for name, spec in SPECS.items() if spec.in_digest}
        made = {"choose": self.choose, "rules": self.rules, "records": self.records, "certifies": self.certifies}
        return {**parts, **made, "dtype_policy": str(self.dtype_policy)}


SPECS: Final[dict[str, OptionSpec]] = {
    field.name: field.metadata["option"] for field in dataclasses.fields(Policy) if "option" in field.metadata
}
"""Omnicomp's own options, by name."""


def parse(mode: str | None, options: Mapping[str, Any] | None, checks: Mapping[str, Check] | None = None) -> Policy:
    """Validate what the user passed.

    Args:
        mode: torch.compile's mode; None means `default`.
        options: omnicomp's own keys and Inductor's config keys.
        checks: by the name of an option, the check of the room that knows what its value names, in place of that of
            its declaration.

    Raises:
        OptionError: a key or a value is wrong; the message names the nearest known one.
    """
    mode = mode or "default"
    if mode not in inductor.modes():
        raise wrong_value("mode", mode, known=inductor.modes())
    own: dict[str, Any] = {}
    passed_on: dict[str, Any] = {}
    for key, value in (options or {}).items():
        name = str(key).replace("-", "_")
        if name in SPECS:
            own[name] = (checks or {}).get(name, SPECS[name].check)(name, value)
        elif name in _WITHOUT_EFFECT:
            warnings.warn(f"the option {name} has no effect any more; leave it out", DeprecationWarning, stacklevel=2)
        elif name in inductor.config_keys():
            passed_on[name] = value
        else:
            known = f"; known ones are {', '.join(SPECS)}, and Inductor's config keys"
            raise OptionError(f"unknown option {key!r}{nearest(name, (*SPECS, *inductor.config_keys())) or known}")
    for name, spec in SPECS.items():
        text = os.environ.get(spec.variable, "")
        if name not in own and text and spec.read is not None:
            own[name] = spec.read(spec.variable, text)
    choice(*PATHS)(PATHS_VARIABLE, os.environ.get(PATHS_VARIABLE) or "absolute")
    asked = own.get("lowerings", LOWERINGS)
    own["choose"] = asked if isinstance(asked, str) else "off"
    numerics = own.get("numerics", "inductor")
    usual = _USUAL.get(numerics, LOWERINGS)  # overrides compute other values
    named = "lowerings" in own and not isinstance(asked, str)
    own["lowerings"], own["rules"] = _placement(asked if named else usual, usual)
    if numerics != "inductor":
        _check_numerics(own)
    if numerics == "batch-invariant":
        own.setdefault("on_error", "raise")  # eager would be no answer
    if numerics == "eager":
        own.setdefault("verify", "first")
        passed_on = {**{key: value for key, value in _EXACT.items() if key in inductor.config_keys()}, **passed_on}
    try:
        patches = inductor.config_patches(mode, passed_on)
    except RuntimeError as error:
        raise OptionError(f"Inductor refuses the options: {error}") from None
    # Looked at here, since a graph that is to be recorded is compiled with Inductor's option on.
    by_inductor = inductor.cudagraphs_configured() or any(name in patches for name in _CUDAGRAPHS)
    if own.get("background"):  # builds in workers can't be recorded, and were asked for
        own.setdefault("cudagraphs", "never")
    policy = Policy(mode=mode, inductor=patches, **own)
    return dataclasses.replace(policy, records=policy.cudagraphs != "never" and not by_inductor)


def _check_numerics(own: Mapping[str, Any]) -> None:
    """Refuse beside the option `numerics` what computes other values by design."""
    dtypes, engines = own.get("dtype_policy", PRESETS["keep"]), set(own["lowerings"]) - {*LOWERINGS, "device"}
    refused = {
        "dtype_policy": dtypes.rewrites,
        f"lowerings={own['choose']!r}": own["choose"] != "off",
        f"the engine {', '.join(sorted(engines))}": bool(engines),
        "background": bool(own.get("background")),
    }
    if own["numerics"] == "batch-invariant":
        refused["the option lowerings"] = own["lowerings"] != ("eager",) or bool(own["rules"])
        refused[f"on_error={own['on_error']!r}" if "on_error" in own else ""] = own.get("on_error", "raise") != "raise"
    for what, found in refused.items():
        if found:
            raise OptionError(
                f"numerics={own['numerics']!r} fixes the values, and {what} gives others; leave one of them out"
            )


def _placement(value: Any, usual: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[Rule, ...]]:
    """The default order, and the rules of the option and of the environment."""
    rules = parse_rules(value, _placeable()) if isinstance(value, Mapping) else ()  # type: ignore[arg-type]
    default = usual if isinstance(value, Mapping) else value
    try:
        rules += parse_environment(os.environ.get("OMNICOMP_PLACE", ""), _placeable())
    except ValueError as error:
        raise OptionError(f"OMNICOMP_PLACE: {error}") from None
    for index in reversed(range(len(rules))):
        if rules[index].selector == "*":  # a new default; what came before it does not count any more
            return rules[index].lowerings, rules[index + 1 :]
    return default, rules


def effective_options(policy: Policy, options: Mapping[str, Any] | None) -> tuple[dict[str, str], dict[str, str]]:
    """Every option of a policy as text, and who gave it: `options`, `mode …`, `environment …` or `default`."""
    passed = {str(key).replace("-", "_") for key in options or {}}
    values: dict[str, str] = {}
    origins: dict[str, str] = {}
    for name, spec in SPECS.items():
        values[name] = text_of(getattr(policy, name))
        # Rules of placement of the environment come after those of the option; any other variable gives way to it.
        if os.environ.get(spec.variable) and (spec.read is None or name not in passed):
            origins[name] = f"environment {spec.variable}"
        else:
            origins[name] = "options" if name in passed else "default"
    if policy.rules:
        rules = [f"{rule.selector}: {' or '.join(rule.lowerings)}" for rule in policy.rules]
        values["lowerings"] = "; ".join((values["lowerings"], *rules))
    for name, value in policy.inductor.items():
        values[name] = text_of(value)
        origins[name] = "options" if name.replace("-", "_") in passed else f"mode {policy.mode}"
    return values, origins


def engines_of(policy: Policy) -> tuple[str, ...]:
    """Names of the engines that may get a part of a graph."""
    asked = [*policy.lowerings, *(name for rule in policy.rules for name in rule.lowerings)]
    known = engine_names()
    return tuple(dict.fromkeys(name for name in asked if name in known))
