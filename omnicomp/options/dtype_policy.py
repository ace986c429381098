"""The dtype policy: the dtype in which operators compute, by operator, by module and by node."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from omnicomp.errors import OptionError, nearest, wrong_value

COMPUTE: Final = (torch.bfloat16, torch.float16, torch.float32)


_RULES: Final = "a mapping of selectors to dtypes"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DtypePolicy:
    """In which dtype a graph computes.

    A selector is an operator (`linear`, `torch.nn.functional.linear`, `aten.mm`), a class of operators (`matrix`,
    `pointwise`, and `softmax`, `norm`, `loss`, `reduction`, `exp` and `cumulative`, which together are `wide`), a
    module's path, a node's name, or `*`; with wildcards. Of several that match, one that names the node alone decides,
    then `keep` before `ops`, `ops` before `modules`, and of one mapping the last entry.

    Attributes:
        compute: of matrix work (linear layers, products, convolutions, attention) that the user left in float32; None
            leaves it as it is written.
        accumulate: of softmax, norms, losses, reductions, exponentials, cumulative sums; float32 or float64.
        keep: selectors of what stays as the user wrote it: operators, modules or nodes.
        ops: dtype by selector of operators or nodes; of any floating-point operator, not of matrix work alone.
        modules: dtype by selector of modules; of every floating-point operator in them.
        matmul: `ieee`, or `tf32`: float32 products may be computed on 19-bit operands, where the device can.
        weights: `once`: a low-precision copy of a parameter is kept and follows it, in inference; `call`: it is made in
            each call.
        fp8: None, or the scales of linear layers in float8: `tensor` or `row`; inference alone.
        auto: whether the device decides on `compute`: what is fast and safe there.
        name: of the preset, or `custom`.
    """

    compute: torch.dtype | None = None
    accumulate: torch.dtype = torch.float32
    keep: Sequence[str] = ()
    ops: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict[str, torch.dtype])
    modules: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict[str, torch.dtype])
    matmul: str = "ieee"
    weights: str = "once"
    fp8: str | None = None
    auto: bool = False
    name: str = "custom"

    def __post_init__(self) -> None:
        """Refuse what no graph could be computed in.

        Raises:
            OptionError: a field has a wrong value; the message names it.
        """
        known = "torch.bfloat16, torch.float16, torch.float32"
        if self.compute not in (None, *COMPUTE):
            raise wrong_value("dtype_policy: compute", self.compute, f"{known} or None")
        if self.accumulate not in (torch.float32, torch.float64):
            raise wrong_value("dtype_policy: accumulate", self.accumulate, "torch.float32 or torch.float64")
        for field, values in (
            ("matmul", ("ieee", "tf32")),
            ("weights", ("once", "call")),
            ("fp8", (None, "tensor", "row")),
        ):
            if getattr(self, field) not in values:
                raise wrong_value(f"dtype_policy: {field}", getattr(self, field), " or ".join(map(repr, values)))
        for field, kind, words in (("auto", bool, "True or False"), ("name", str, "a string")):
            if not isinstance(getattr(self, field), kind):
                raise wrong_value(f"dtype_policy: {field}", getattr(self, field), words)
        if self.auto and self.compute is not None:
            raise OptionError(
                f"dtype_policy: auto leaves compute to the device, and compute is {self.compute}; leave one of them out"
            )
        if self.fp8 is not None and self.compute is None and not self.auto:
            raise OptionError("dtype_policy: fp8 needs compute=torch.bfloat16, or auto, for what is not done in float8")
        keep: Any = self.keep
        if not isinstance(keep, (list, tuple, set, frozenset)) or not all(isinstance(item, str) for item in keep):
            raise wrong_value("dtype_policy: keep", self.keep, "a list of selectors", example=["head"])
        object.__setattr__(self, "keep", tuple(sorted(keep) if isinstance(keep, (set, frozenset)) else keep))
        for field in ("ops", "modules"):
            rules: Any = getattr(self, field)
            if not isinstance(rules, Mapping):
                raise wrong_value(f"dtype_policy: {field}", rules, _RULES, example={"linear": "bf16"})
            for selector, dtype in rules.items():
                if not isinstance(selector, str) or dtype not in COMPUTE:
                    raise wrong_value(f"dtype_policy: {field}[{selector!r}]", dtype, known)
            # A copy: graphs are known by the policy, which must not change with what the caller holds.
            object.__setattr__(self, field, dict(rules))

    def __repr__(self) -> str:
        """The fields that differ from their defaults, in order: the same for equal policies, in every process."""
        shown = [
            f"{f.name}={_plain(getattr(self, f.name))!r}"
            for f in dataclasses.fields(self)
            if _plain(getattr(self, f.name)) != _plain(_default(f))
        ]
        return f"DtypePolicy({', '.join(shown)})"

    def __str__(self) -> str:
        """The name of a preset, or the fields that differ from their defaults."""
        return self.name if PRESETS.get(self.name) == self else repr(self)

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal, with mappings in the same order, as the last entry of several decides."""
        return isinstance(other, DtypePolicy) and repr(self) == repr(other)

    def __hash__(self) -> int:
        """Of equal policies the same; its mappings have none of their own."""
        return hash(repr(self))

    @property
    def changes(self) -> bool:
        """Whether it asks for anything but what the user wrote."""
        return self.rewrites or self.matmul != "ieee"

    @property
    def rewrites(self) -> bool:
        """Whether it asks for operators in other dtypes than the user's; `matmul` changes how they compute alone."""
        wide = self.accumulate is not torch.float32
        return bool(self.auto or self.compute or self.ops or self.modules or self.fp8 or wide)


def short(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _default(field: "dataclasses.Field[Any]") -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


PRESETS: Final[dict[str, DtypePolicy]] = {
    "keep": DtypePolicy(name="keep"),
    "auto": DtypePolicy(name="auto", auto=True),
    "bf16": DtypePolicy(name="bf16", compute=torch.bfloat16),
    "fp16": DtypePolicy(name="fp16", compute=torch.float16),
    "tf32": DtypePolicy(name="tf32", matmul="tf32"),
    "fp8": DtypePolicy(name="fp8", compute=torch.bfloat16, fp8="row"),
}


def parse_dtype_policy(value: Any) -> DtypePolicy:
    """A policy from the name of a preset, a `DtypePolicy`, or a mapping of its fields.

    A mapping may start from a preset by its key `preset`; dtypes may be given by name, as in `"bfloat16"` or `"bf16"`.

    Raises:
        OptionError: the name or a field is unknown, or a value is wrong.
    """
    if isinstance(value, DtypePolicy):
        return value
    if isinstance(value, str) and value in PRESETS:
        return PRESETS[value]
    if not isinstance(value, Mapping):
        preset = PRESET_OF.get(value, "") if isinstance(value, torch.dtype) else ""
        text = value.lower() if isinstance(value, str) else preset
        hint = nearest(text, PRESETS)
        accepted = f"{', '.join(PRESETS)}, a DtypePolicy, or a mapping of its fields{hint}"
        raise wrong_value("dtype_policy", value, accepted, example="" if hint else "'bf16'")
    given = {str(key): item for key, item in value.items()}
    base = parse_dtype_policy(given.pop("preset", "keep"))
    known = {f.name for f in dataclasses.fields(DtypePolicy)} - {"name"}
    unknown = [key for key in given if key not in known]
    if unknown:
        hint = nearest(unknown[0], sorted(known)) or f"; known ones are {', '.join(sorted(known))}"
        raise OptionError(f"dtype_policy has no field {unknown[0]!r}{hint}")
    for key in ("compute", "accumulate"):
        if key in given:
            given[key] = _dtype(given[key])
    for key in ("ops", "modules"):
        if key in given:
            if not isinstance(given[key], Mapping):
                raise wrong_value(f"dtype_policy: {key}", given[key], _RULES, example={"linear": "bf16"})
            given[key] = {str(selector): _dtype(dtype) for selector, dtype in given[key].items()}
    return dataclasses.replace(base, **{"name": "custom", **given}) if given else base


PRESET_OF: Final = {torch.bfloat16: "bf16", torch.float16: "fp16"}
NAME: Final = "dtype_policy"
_NAMES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_SHORT: Final = {dtype: name for name, dtype in _NAMES.items()}


def _dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = _NAMES.get(value, getattr(torch, value.removeprefix("torch."), None))
    if not isinstance(found, torch.dtype):
        hint = nearest(value, (*_NAMES, *map(short, _SHORT)))
        raise wrong_value("dtype_policy: a dtype", value, f"bfloat16, float16, float32 or float64{hint}")
    return found
