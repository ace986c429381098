"""The models of `bench_attention.py`: under every backend, and with the fused attentions of transformers itself."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from attention_run import OURS, Call, Plan, Settings
from bench_models import GPU_SIZES
from torch import Tensor, nn

from omnicomp.testing.models import SIZES, Case, Size, build

__all__ = ["ROWS", "Row", "plan", "transformers_version"]

# Name of a candidate: transformers' setting, and the backend.
_CANDIDATES: Final = {
    "eager": ("eager", None),
    "inductor": ("eager", "inductor"),
    "sdpa+inductor": ("sdpa", "inductor"),
    "flex+inductor": ("flex_attention", "inductor"),
    OURS: ("eager", "omni"),
}

# Not run on a GPU, where it might take the device along.
_OUT_OF_BOUNDS: Final = {
    (
        "t5",
        "flex+inductor",
    ): "transformers indexes T5's position bias, whose batch size is 1, with the sequence's number"
}

_GPU_SIZES: Final = {
    **GPU_SIZES,
    "gemma2": Size(width=2048, heads=8, layers=4, batch=1, length=8192, vocabulary=32000),
    "bloom": Size(width=2048, heads=32, layers=4, batch=2, length=2048, vocabulary=32000),
    "gpt2": Size(width=1024, heads=16, layers=8, batch=8, length=1024, vocabulary=50257),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A model, with its padding mask full or not, in inference or in a training step."""

    model: str
    padded: bool
    training: bool

    @property
    def key(self) -> str:
        """Name of the row."""
        return f"{self.model}{'-padded' if self.padded else ''}/{'training' if self.training else 'inference'}"


_NAMES: Final = ("llama", "bert", "gpt2", "gemma2", "vit", "t5", "bloom")

ROWS: Final = [
    Row(model=model, padded=padded, training=training)
    for model, padded in [*((name, False) for name in _NAMES), ("llama", True)]
    for training in (False, True)
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
        return _call(_variant(case, implementation), backend, settings, training=row.training)

    def reference() -> Sequence[Tensor]:
        # A backward in float64 would need more memory than a device has.
        dtype = torch.float32 if row.training and settings.device == "cuda" else torch.float64
        model = copy.deepcopy(case.model).to(dtype)
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in case.inputs.items()}
        higher = dataclasses.replace(case, model=model, inputs=inputs)
        return _call(higher, None, settings, training=row.training)()

    calls = {
        name: functools.partial(make, name, *how)
        for name, how in _CANDIDATES.items()
        if not {"warm": how[1] is None, "check": name in ("inductor", OURS)}.get(settings.task, False)
    }
    facts = {"model": row.model, "padded": row.padded, "training": row.training, "size": dataclasses.asdict(size)}
    return Plan(calls=calls, reference=reference), facts


def _size(name: str, device: str, *, quick: bool) -> Size:
    if quick:
        return SIZES["tiny"]
    return _GPU_SIZES[name] if device == "cuda" else SIZES["cpu"]


def _case(row: Row, size: Size, settings: Settings) -> Case:
    with torch.device(settings.device):  # random weights are made where they are used
        if row.model in _BUILDERS:
            torch.manual_seed(0)
            case = _BUILDERS[row.model](size)
            case = dataclasses.replace(case, model=case.model.eval())
        else:
            SIZES["attention"] = size
            case = build(row.model, "attention")
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
        if model.config._attn_implementation != implementation:
            raise ValueError(f"transformers has no {implementation} for {type(model).__name__}")
    return dataclasses.replace(case, model=model)


def _call(case: Case, backend: str | None, settings: Settings, *, training: bool) -> Call:
    model: Any = case.model if backend is None else settings.compiled(case.model, backend)
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

    return step if training else forward


def _hand_written(config: Any) -> Any:
    config._attn_implementation = "eager"
    return config


def _made(name: str, model: nn.Module, size: Size) -> Case:
    tokens = torch.randint(1, size.vocabulary, (size.batch, size.length))
    mask = torch.ones(size.batch, size.length, dtype=torch.long)
    return Case(
        name=name,
        model=model,
        inputs={"input_ids": tokens, "attention_mask": mask},
        sites=size.layers,
        output=lambda output: output.last_hidden_state,
    )


def _gemma2(size: Size) -> Case:
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        hidden_size=size.width,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        head_dim=size.width // size.heads,
        query_pre_attn_scalar=size.width // size.heads,
        num_hidden_layers=size.layers,
        intermediate_size=4 * size.width,
        vocab_size=size.vocabulary,
        max_position_embeddings=max(512, size.length),
        sliding_window=size.length // 2,  # every other layer; at the GPU's size it is Gemma 2's own 4096
        use_cache=False,
    )
    return _made("gemma2", Gemma2Model(_hand_written(config)), size)


def _bloom(size: Size) -> Case:
    from transformers import BloomConfig, BloomModel

    config = BloomConfig(
        hidden_size=size.width,
        n_head=size.heads,
        n_layer=size.layers,
        vocab_size=size.vocabulary,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    return _made("bloom", BloomModel(_hand_written(config)), size)


def _gpt2(size: Size) -> Case:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        n_embd=size.width,
        n_head=size.heads,
        n_layer=size.layers,
        n_positions=max(512, size.length),
        vocab_size=size.vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return _made("gpt2", GPT2Model(_hand_written(config)), size)


_BUILDERS: Final[dict[str, Callable[[Size], Case]]] = {"gemma2": _gemma2, "bloom": _bloom, "gpt2": _gpt2}
