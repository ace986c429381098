"""The models of `bench_attention.py`: under every backend, and with the fused attentions of transformers itself."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch
from attention_builders import BUILDERS
from attention_builders import SIZES as SIZES_OF_MORE
from attention_run import OURS, Call, Plan, Settings
from bench_models import GPU_SIZES
from torch import Tensor

from omnicomp.testing.models import SIZES, Case, Size, build

# Name of a candidate: transformers' setting, and the backend. Omni's setting is that of the row.
_CANDIDATES: Final = {
    "eager": ("eager", None),
    "inductor": ("eager", "inductor"),
    "sdpa+inductor": ("sdpa", "inductor"),
    "flex+inductor": ("flex_attention", "inductor"),
    OURS: ("", "omni"),
}

# Not run on a GPU, where it might take the device along.
_OUT_OF_BOUNDS: Final = {
    (
        "t5",
        "flex+inductor",
    ): "transformers indexes T5's position bias, whose batch size is 1, with the sequence's number"
}

_GPU_SIZES: Final = {**GPU_SIZES, **SIZES_OF_MORE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A model, in inference or in a training step.

    Attributes:
        model: its name.
        training: whether it is a training step.
        padded: whether its padding mask is not full.
        setting: transformers' setting under which omni runs it: `eager`, or `sdpa` as it comes.
        by_layer: whether each decoder layer is compiled by itself, by each backend.
    """

    model: str
    training: bool
    padded: bool = False
    setting: str = "eager"
    by_layer: bool = False

    @property
    def key(self) -> str:
        """Name of the row."""
        name = self.model + ("-padded" if self.padded else "") + ("-layers" if self.by_layer else "")
        name += f"-{self.setting}" if self.setting != "eager" else ""
        return f"{name}/{'training' if self.training else 'inference'}"


# Those that are trained as well.
_TRAINED: Final = ("llama", "bert", "gpt2", "gemma2", "vit", "t5", "bloom", "qwen3", "mistral", "modernbert", "nanogpt")
_TRAINED_TOO: Final = ("swin", "whisper")
_NAMES: Final = (*_TRAINED, *_TRAINED_TOO, "mixtral", "gpt_oss", "deberta", "sam", "unet")
_CALLED: Final = ("llama", "qwen3", "mistral", "modernbert", "whisper", "t5")

ROWS: Final = [
    *(Row(model=name, training=False) for name in _NAMES),
    *(Row(model=name, training=False, setting="sdpa") for name in _CALLED),
    Row(model="llama", training=False, padded=True),
    Row(model="llama", training=False, padded=True, setting="sdpa"),
    *(Row(model="llama", training=t, setting=s, by_layer=True) for s in ("eager", "sdpa") for t in (False, True)),
    *(Row(model=name, training=True) for name in (*_TRAINED, *_TRAINED_TOO)),
    *(Row(model=name, training=True, setting="sdpa") for name in ("llama", "qwen3")),
    Row(model="llama", training=True, padded=True),
]


def transformers_version() -> str:
    """Version of transformers, for the record."""
    import transformers

    return str(transformers.__version__)


def plan(row: Row, settings: Settings, *, quick: bool) -> tuple[Plan, dict[str, Any]]:
    """The row's candidates, and what is to be known of it."""
    size = _size(row.model, settings.device, quick=quick)
    case = _case(row, size, settings)

    def make(name: str, implementation: str, backend: str | None) -> Call:
        if settings.device == "cuda" and (row.model, name) in _OUT_OF_BOUNDS:
            raise NotImplementedError(_OUT_OF_BOUNDS[row.model, name])
        return _call(_variant(case, implementation or row.setting), backend, settings, row)

    def reference() -> Sequence[Tensor]:
        # A backward in float64 would need more memory than a device has.
        dtype = torch.float32 if settings.device == "cuda" else torch.float64
        model = copy.deepcopy(case.model).to(dtype)
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in case.inputs.items()}
        higher = dataclasses.replace(case, model=model, inputs=inputs)
        return _call(higher, None, settings, row)()

    calls = {
        name: functools.partial(make, name, *how)
        for name, how in _CANDIDATES.items()
        if settings.task != "check" or name not in ("inductor", OURS)
    }
    facts = {**dataclasses.asdict(row), "size": dataclasses.asdict(size)}
    return Plan(calls=calls, reference=reference), facts


def _size(name: str, device: str, *, quick: bool) -> Size:
    if quick:
        return SIZES["tiny"]
    return _GPU_SIZES[name] if device == "cuda" else SIZES["cpu"]


def built(model: str, size: Size, device: str) -> Case:
    """A model of `bench_attention.py` in float32, with random weights, and its inputs."""
    with torch.device(device):  # random weights are made where they are used
        if model in BUILDERS:
            torch.manual_seed(0)
            case = BUILDERS[model](size)
            return dataclasses.replace(case, model=case.model.eval())
        SIZES["attention"] = size
        return build(model, "attention")


def _case(row: Row, size: Size, settings: Settings) -> Case:
    case = built(row.model, size, settings.device)
    mask = case.inputs.get("attention_mask")
    if mask is not None and not row.padded:
        case.inputs["attention_mask"] = torch.ones_like(mask)
    return case.to(settings.device, settings.dtype)


def _variant(case: Case, implementation: str) -> Case:
    """The case with a model of its own that shares the weights and has another attention setting.

    Raises:
        ValueError: transformers does not know the setting for this model.
    """
    shared = {id(tensor): tensor for tensor in itertools.chain(case.model.parameters(), case.model.buffers())}
    model: Any = copy.deepcopy(case.model, shared)
    if implementation != "eager":
        model.set_attn_implementation(implementation)
        if case.name == "sam":  # its classes are chosen when it is built
            with torch.device(next(case.model.parameters()).device):
                model = type(model)(model.config).eval()
            model.load_state_dict(case.model.state_dict(), assign=True)
        if model.config._attn_implementation != implementation:
            raise ValueError(f"transformers has no {implementation} for {type(model).__name__}")
    return dataclasses.replace(case, model=model)


def _call(case: Case, backend: str | None, settings: Settings, row: Row) -> Call:
    model: Any = case.model
    if backend is not None and row.by_layer:
        for number, layer in enumerate(model.layers):
            model.layers[number] = settings.compiled(layer, backend)
    elif backend is not None:
        model = settings.compiled(model, backend)
    graphs = settings.cudagraphs and backend is not None
    weight: list[Tensor] = []

    def forward() -> Sequence[Tensor]:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return [case.output(model(**case.inputs))]

    def step() -> Sequence[Tensor]:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        output = case.output(model(**case.inputs))
        if not weight:
            # Random, as the last norm keeps the mean square of the output: its gradient would be nothing but rounding.
            generator = torch.Generator(output.device).manual_seed(1)
            weight.append(torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype))
        output.backward(weight[0])
        gradients = [p.grad for p in case.model.parameters() if p.grad is not None]
        case.model.zero_grad(set_to_none=True)
        return gradients

    return step if row.training else forward
