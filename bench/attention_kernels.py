"""The kernels that a user could pick by hand for one attention layer: the limit that a compiler is measured against.

Everything that does not depend on the layer's own inputs in a model, such as a dense mask or a block mask, is made
before the clock starts; what is learned is computed in the call. A candidate that a device, shape or version of torch
does not take raises, and the bench records that.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attention_forms import Form, Layer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Kernel = Callable[[], Tensor]
Compile = Callable[[Kernel], Kernel]


def kernels(layer: Layer, tensors: dict[str, Tensor], form: Form, compiled: Compile) -> dict[str, Callable[[], Kernel]]:
    """What to try, by name; each makes a kernel's call, which returns (batch, length, heads * width).

    Args:
        layer: the sizes.
        tensors: inputs of `attention_forms.make_tensors`.
        form: what the layer computes.
        compiled: `torch.compile` under Inductor, or the identity.
    """
    on_gpu = tensors["query"].device.type == "cuda"
    found: dict[str, Callable[[], Kernel]] = {}
    if form.sinks is None and (form.change is None or form.bias is not None):
        dense = form.bias is not None or not (form.causal or form.mask is None)
        names = (("cudnn", "efficient") if dense else ("cudnn", "flash", "efficient")) if on_gpu else ("flash",)
        for name in names:
            found[f"sdpa {name}{', dense' if dense else ''}"] = _sdpa(name, tensors, form, compiled, dense=dense)
    if form.sinks is not None and not layer.training:
        for name in ("cudnn", "flash") if on_gpu else ("flash for cpu",):
            found[f"{name} with log-sum-exp"] = _with_logsumexp(name, tensors, form, compiled)
    if on_gpu and (form.window is not None or form.documents):
        found["flash, varlen"] = _varlen(layer, tensors, form)
    found["flex"] = _flex(layer, tensors, form, compiled, prebuilt=True)
    if form.per_sequence:
        found["flex, mask made in the call"] = _flex(layer, tensors, form, compiled, prebuilt=False)
    return found


def _heads_first(tensors: dict[str, Tensor]) -> Iterator[Tensor]:
    return (tensors[name].transpose(1, 2) for name in ("query", "key", "value"))


def _merge(output: Tensor) -> Tensor:
    return output.transpose(1, 2).flatten(2)


def _sdpa(name: str, tensors: dict[str, Tensor], form: Form, compiled: Compile, *, dense: bool) -> Callable[[], Kernel]:
    backend = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }[name]
    heads, kv_heads = tensors["query"].shape[2], tensors["key"].shape[2]
    repeats = heads // kv_heads if name == "efficient" else 1  # that kernel knows no groups

    def attend(mask: Tensor | None) -> Tensor:
        query, key, value = _heads_first(tensors)
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        with sdpa_kernel(backend):
            return _merge(
                scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=mask,
                    is_causal=form.causal and not dense,
                    scale=form.scale,
                    enable_gqa=heads != kv_heads and repeats == 1,
                )
            )

    def make() -> Kernel:
        if dense and form.learned:
            return compiled(lambda: attend(_additive(tensors, form)))
        with torch.no_grad():
            mask = _additive(tensors, form) if dense else None
        return lambda: attend(mask)

    return make


def _additive(tensors: dict[str, Tensor], form: Form) -> Tensor:
    """The mask as SDPA takes it: boolean if nothing is added to the scores."""
    if form.bias is None:
        assert form.mask is not None
        return form.mask()
    bias = form.bias().to(tensors["query"].dtype)
    if form.mask is not None:
        bias = bias.masked_fill(~form.mask(), -torch.inf)
    return bias.contiguous()  # a permuted table's rows do not lie one after another, as the kernels want


def _with_logsumexp(name: str, tensors: dict[str, Tensor], form: Form, compiled: Compile) -> Callable[[], Kernel]:
    """Causal attention, rescaled by the share that the sink leaves: sigmoid(log-sum-exp - sink); forward only."""
    ops = torch.ops.aten

    def call() -> Tensor:
        query, key, value = _heads_first(tensors)
        if name == "cudnn":
            results = ops._scaled_dot_product_cudnn_attention(
                query, key, value, None, True, 0.0, True, False, scale=form.scale
            )
        elif name == "flash":
            results = ops._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=form.scale)
        else:
            results = ops._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=form.scale)
        return _merge(_rescaled(results[0], results[1].reshape(query.shape[:3]), form))

    return lambda: compiled(call)


def _rescaled(output: Tensor, logsumexp: Tensor, form: Form) -> Tensor:
    assert form.sinks is not None
    share = torch.sigmoid(logsumexp - form.sinks[None, :, None])
    return (output * share[..., None]).to(output.dtype)


def _varlen(layer: Layer, tensors: dict[str, Tensor], form: Form) -> Callable[[], Kernel]:
    """Flash attention over sequences laid end to end, for documents and for windows."""

    def make() -> Kernel:
        from torch.nn.attention import varlen

        function: Any = varlen.varlen_attn
        parameters = inspect.signature(function).parameters
        arguments: dict[str, Any] = {"scale": form.scale} if "scale" in parameters else {}
        if "window_size" in parameters:
            arguments["window_size"] = (-1 if form.window is None else form.window - 1, 0)
        elif form.window is None:
            arguments["is_causal"] = True
        else:
            raise NotImplementedError("varlen_attn of this torch has no window")
        if layer.heads != layer.kv_heads and "enable_gqa" in parameters:
            arguments["enable_gqa"] = True
        ids = tensors["document"] if form.documents else torch.arange(layer.batch)[:, None].expand(-1, layer.length)
        _, counts = torch.unique_consecutive(ids.flatten(), return_counts=True)
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(tensors["query"].device, torch.int32)
        longest = int(counts.max())

        def call() -> Tensor:
            query, key, value = (tensors[name].flatten(0, 1) for name in ("query", "key", "value"))
            output = function(query, key, value, ends, ends, longest, longest, **arguments)
            return output.reshape(layer.batch, layer.length, -1)

        return call

    return make


def _flex(
    layer: Layer, tensors: dict[str, Tensor], form: Form, compiled: Compile, *, prebuilt: bool
) -> Callable[[], Kernel]:
    def make() -> Kernel:
        from torch.nn.attention import flex_attention as flex

        def block_mask() -> Any:
            if form.predicate is None:
                return None
            batch = layer.batch if form.per_sequence else None
            device = tensors["query"].device
            return flex.create_block_mask(form.predicate, batch, None, layer.length, layer.length, device=device)

        ready = block_mask() if prebuilt else None
        grouped = layer.heads != layer.kv_heads

        def call() -> Tensor:
            query, key, value = _heads_first(tensors)
            score_mod: Any = form.score_mod() if form.score_mod is not None else None
            arguments: dict[str, Any] = {
                "score_mod": score_mod,
                "block_mask": ready if prebuilt else block_mask(),
                "scale": form.scale,
                "enable_gqa": grouped,
            }
            if form.sinks is None:
                return _merge(flex.flex_attention(query, key, value, **arguments))  # type: ignore[arg-type]
            aux = flex.AuxRequest(lse=True)
            output: Any = flex.flex_attention(query, key, value, return_aux=aux, **arguments)
            return _merge(_rescaled(output[0], output[1].lse, form))

        return compiled(call)

    return make
