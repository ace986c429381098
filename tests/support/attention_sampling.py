"""Drawing programs of attention, so that every spelling meets every other that it can stand beside.

The same rules serve hypothesis, which can make a failing program smaller, and plain random numbers. The first option of
a choice is the plainest, because that is where hypothesis goes.
"""

import random
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

import attention_spellings
from attention_programs import Program

T = TypeVar("T")

LENGTHS: Final = (5, 1, 2, 3, 4, 6, 7, 8, 9, 16, 33)
FUSED: Final = ("packed", "unbind", "permuted", "interleaved")
GROUPED: Final = ("einsum_grouped", "grouped_matmul", "folded")
FLAT: Final = ("bmm", "bmm_view", "baddbmm_empty", "baddbmm_bias")
TRANSPOSING: Final = ("matmul", "at", "method", "einsum_bhdk", *FLAT)
IN_ROW_ORDER: Final = ("matmul", "at", "method", "einsum_bhqd", "bmm_view")
BIASES: Final = ("head", "1hqk", "b1qk", "bhqk", "qk", "b11k", "alibi", "alibi_keys", "t5")
COMPUTED: Final = ("query", "shaw", "gated", "swin")
SCALES: Final = ("mul", "div", "buffer", "tensor_div", "q_mul", "q_div", "k_mul", "both", "none", "after_mask", "head")


class Choose(Protocol):
    """Picks one of some options for a named choice."""

    def __call__(self, name: str, options: Sequence[T], /) -> T:
        """Pick one."""
        ...


def random_program(seed: int, index: int) -> Program:
    """The program with an index in the sequence that a seed starts."""
    numbers = random.Random(f"{seed}:{index}")

    def choose(name: str, options: Sequence[T]) -> T:
        return numbers.choice(options)

    return sample(choose)


def sample(choose: Choose, *, training: bool | None = None, dynamic: bool | None = None) -> Program:
    """Draw a program that eager can run.

    Args:
        choose: called once for each choice that is open.
        training: whether gradients are compared; None leaves it open.
        dynamic: whether it is called with two sizes; None leaves it open, one in six.
    """
    fields: dict[str, Any] = {}
    training = choose("training", (False, True)) if training is None else training
    dynamic = choose("dynamic", (False,) * 5 + (True,)) if dynamic is None else dynamic
    fields["training"] = training
    if dynamic:
        fields["dynamic"] = choose("kind of dynamic", ("mark", "mark", "mark", "automatic", "dynamic"))
        fields["grow"] = choose("grow", ("lengths", "batch", "both"))
    fields["dtype"] = choose("dtype", ("float32",) * 5 + ("bfloat16",) * 3 + ("float64", "float16"))
    fields["seed"] = choose("seed", range(1000))
    _structure(choose, fields, dynamic)
    _scores(choose, fields, dynamic)
    _masks(choose, fields)
    _rest(choose, fields)
    return Program(**fields)


def _often(plain: T, *others: T, times: int) -> tuple[T, ...]:
    """Options of which the first comes as often as `times` of the others."""
    return (plain,) * times + others


def _structure(choose: Choose, f: dict[str, Any], dynamic: bool) -> None:
    """Rank, heads, lengths, where the tensors come from, and the products."""
    rank = f["rank"] = choose("rank", _often(4, 2, 3, 5, times=12))
    f["batch"] = 1 if rank == 2 else choose("batch", (2, 1, 3))
    if rank == 2 and dynamic:
        f["grow"] = "lengths"
    f["queries"] = choose("queries", LENGTHS)
    f["keys"] = f["queries"] if choose("cross", (False, False, True)) else choose("keys", LENGTHS)
    f["size"] = choose("size", (8, 4, 16, 20))
    f["value_size"] = choose("value_size", _often(f["size"], 12, times=5))
    f["kv_heads"] = f["heads"] = 1 if rank in (2, 3) else choose("heads", (2, 1, 3, 4))
    if rank != 4:
        f["product"] = choose("product", ("matmul", "at", "method", "einsum_dots"))
        f["value"] = choose("value", tuple(attention_spellings.VALUES[attention_spellings.RANKS[rank], "bhsd"]))
        f["key"] = choose("key", tuple(attention_spellings.TRANSPOSES))
        return
    grouping = choose(
        "grouping", _often("none", "repeat_interleave", "expand", "repeat", "broadcast", "product", times=4)
    )
    products = [name for name in attention_spellings.PRODUCTS if (name in GROUPED) == (grouping == "product")]
    if grouping == "broadcast":
        products = [name for name in products if name not in FLAT]
    product = f["product"] = choose("product", products)
    if grouping != "none":
        f["grouping"] = "none" if grouping == "product" else grouping
        f["kv_heads"] = 1 if grouping == "broadcast" else choose("kv_heads", (1, 2))
        f["heads"] = f["kv_heads"] * choose("groups", (2, 3))
    entry = attention_spellings.PRODUCTS[product]
    values = [
        name
        for name in attention_spellings.VALUES[entry.form, entry.order]
        if not (grouping == "broadcast" and name == "bmm")
    ]
    f["value"] = choose("value", values)
    sources = ["bhsd", "bshd", "projected", "seq_first", "channels"]
    if f["queries"] < f["keys"]:
        sources += ["cached", "cached"]
    if f["queries"] == f["keys"] and f["size"] == f["value_size"]:
        sources += FUSED if f["heads"] == f["kv_heads"] else ("packed",)
    source = f["source"] = choose("source", sources)
    f["swap"] = choose("swap", tuple(attention_spellings.SWAPS))
    keys = list(attention_spellings.TRANSPOSES)
    if product in TRANSPOSING and grouping == "none":
        keys += {"bhsd": ["stored"], "bshd": ["permuted_once"]}.get(source, [])
    f["key"] = choose("key", keys)
    f["merge"] = choose("merge", ("none", "swapped", "reshaped", "contiguous", "flattened", "projected"))


def _scores(choose: Choose, f: dict[str, Any], dynamic: bool) -> None:
    """Scale, normalisation, softcap, bias."""
    plain_keys = f["key"] not in ("stored", "permuted_once")
    norm = f["norm"] = choose("norm", _often("none", "normalize", "norm", times=12)) if plain_keys else "none"
    f["scale"] = choose("scale", SCALES if norm == "none" else ("tau", "mul"))
    if f["product"].startswith("baddbmm"):
        f["scale"] = choose("scale of baddbmm", ("none", "after_mask", "mul"))
    f["factor"] = choose("factor", (0.5, 0.25, 0.3, 1.5, *((-0.5,) * (f["scale"] != "both"))))
    f["softcap"] = choose("softcap", _often("none", "functions", "scale_first", "method", times=15))
    biases = BIASES
    if f["rank"] == 4:
        biases += COMPUTED[:-1] if dynamic else COMPUTED
    f["bias"] = choose("bias", ("none",) * len(biases) + biases)
    f["inplace"] = choose("inplace", (False, False, False, True))


def _masks(choose: Choose, f: dict[str, Any]) -> None:
    """Masks, and how they are applied."""
    fits = f["queries"] <= f["keys"]
    masks = (*attention_spellings.MASKS, "random", "positions")
    if f["rank"] == 4 and f["product"] in IN_ROW_ORDER[:3] and f["batch"] == 2:
        masks += ("shifted",)
    mask = f["mask"] = choose("mask", ("none",) * (len(masks) // 2) + masks)
    if mask in (*attention_spellings.MASKS, "positions"):
        f["bottom_right"] = choose("bottom_right", (True, True, False)) if mask in attention_spellings.MASKS else fits
    if mask in attention_spellings.MASKS:
        origins = _often("graph", "additive", "input", "input_additive", times=4)
        origins += ("triu",) * (mask in attention_spellings.CAUSAL) + ("buffer",) * (fits or not f["bottom_right"])
        f["mask_from"] = choose("mask_from", origins)
    f["padding"] = choose("padding", _often("none", "right", "left", "full", "holes", times=5))
    if f["padding"] != "none":
        f["padding_dtype"] = choose("padding_dtype", ("bool", "int64", "float"))
        if f["padding_dtype"] != "bool" and f["rank"] == 4 and choose("alibi of padding", (False,) * 7 + (True,)):
            f["bias"] = "alibi_padding"
    f["documents"] = fits and choose("documents", _often(False, True, times=7))
    masked = mask != "none" or f["padding"] != "none" or f["documents"]
    if not masked:
        return
    numbers = mask == "shifted" or f.get("mask_from") in ("additive", "triu", "input_additive")
    f["combine"] = "sequence" if numbers else choose("combine", ("and", "and", "sequence"))
    if numbers and mask != "shifted" and f["padding"] != "none" and not f["documents"] and f["padding_dtype"] != "bool":
        f["combine"] = choose("combine of numbers", ("sequence", "filled"))
    f["masking"] = choose("masking", tuple(attention_spellings.MASKINGS))
    fills = [
        name for name in attention_spellings.FILLS if not (f["masking"] in ("add_product", "blend") and name == "-inf")
    ]
    if f["dtype"] == "float16":
        fills = [name for name in fills if name != "-1e9"]
    f["fill"] = choose("fill", fills)
    if numbers and mask != "shifted" and f["bias"] != "none" and f["product"] != "baddbmm_bias":
        f["joined"] = choose("joined", (False, True))
    if mask != "shifted" and not f.get("joined"):
        f["changed"] = choose("changed", _often(*attention_spellings.CHANGES, times=24))
    plain = f["rank"] == 4 and attention_spellings.PRODUCTS[f["product"]].order == "bhsd" and not f["training"]
    # Scores times a mask are read as a fill, to which it does not matter that zero times inf is not zero.
    plain = plain and f["masking"] != "blend"
    if plain and f["padding"] != "none" and f["key"] in attention_spellings.TRANSPOSES and f["dtype"] != "float16":
        f["held"] = choose("held", _often("none", "nan", "inf", "large", times=6))
    f["bias_last"] = f["bias"] != "none" and choose("bias_last", _often(False, True, times=5))


def _rest(choose: Choose, f: dict[str, Any]) -> None:
    """Softmax, what follows it, and what is around all of it."""
    softmaxes = tuple(attention_spellings.SOFTMAXES)
    f["softmax"] = choose("softmax", softmaxes[:6] + softmaxes)
    if f["product"] != "key_first":
        f["sinks"] = choose("sinks", _often("none", "cat", "cat_max", "first", "zero", times=36))
    f["after"] = choose(
        "after",
        ("none",) * 20
        + ("dropout0", "dropout_eval") * 5
        + ("head_mask", "row_mask", "nan_to_num", "masked_zero", "weights"),
    )
    regions = _often("plain", "checkpoint", times=8)
    if not f["training"]:
        regions += ("no_grad",)
    if f["dtype"] in ("float32", "bfloat16"):
        regions += ("autocast",)
    f["region"] = choose("region", regions)
    if f["after"] != "weights":
        f["layers"] = choose("layers", _often(1, 2, times=12))
