"""From the results of `bench_attention.py` to tables, targets and plots; needs no GPU."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from attention_run import OURS
from harness import Timing, geometric_mean, markdown_table
from plot import bar_chart

Record = dict[str, Any]

PROGRAMS: Final = ("eager", "inductor", OURS)  # every other candidate of a form was picked by hand
BETTER: Final = "the better one of Inductor and sdpa+Inductor"
BEGIN: Final = "<!-- attention: begin -->"
END: Final = "<!-- attention: end -->"


@dataclasses.dataclass(frozen=True)
class Target:
    """What is to be reached, what was, and where it was not."""

    claim: str
    reached: str
    met: bool
    short: tuple[str, ...] = ()


def report(records: Sequence[Record], plots: Iterable[str] = ()) -> str:
    """Markdown: where it was measured, targets, both tables, what failed.

    Args:
        records: lines of the results.
        plots: names of files beside the page.
    """
    if not records:
        return "Nothing was measured."
    models, forms = _part(records, "models"), _part(records, "forms")
    lost = [r for r in records if r["part"] == "lost"]
    records = [*models, *forms]
    seen = {
        f"{r['machine']}, {r['dtype']}"
        + (f", transformers {r['transformers']}" if "transformers" in r else "")
        + (", CUDA graphs" if r["cudagraphs"] else "")
        for r in records
    }
    parts = ["\n".join(f"Measured with {line}." for line in sorted(seen)), _targets(models, forms)]
    parts += [f"![{name.removesuffix('.svg')}]({name})" for name in plots]
    if models:
        parts += ["### Models", _models_table(models)]
    if forms:
        parts += ["### Single layers", _forms_table(forms), "Every kernel picked by hand, ms:", _kernels_table(forms)]
    failures = [f"- `{r['key']}`, {name}: {why}" for r in [*lost, *records] for name, why in r["failures"].items()]
    missed = [f"- `{r['key']}`: {why}" for r in records for why in dict.fromkeys(r.get("sites", {}).get("missed", []))]
    if failures:
        parts += ["Candidates that could not be measured:", "\n".join(failures)]
    if missed:
        parts += ["Sites that omni left alone:", "\n".join(missed)]
    return "\n\n".join(parts)


def insert(page: str, text: str) -> str:
    """The page with what stands between its markers replaced.

    Raises:
        ValueError: the page has not both markers.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs a line {BEGIN} and, below it, a line {END}")
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def charts(records: Sequence[Record]) -> dict[str, str]:
    """SVG documents by file name."""
    models, forms = _part(records, "models"), _part(records, "forms")
    drawn: dict[str, str] = {}
    if models:
        names = {"sdpa+inductor": "transformers' sdpa + Inductor", "flex+inductor": "flex + Inductor", OURS: OURS}
        drawn["attention-models.svg"] = bar_chart(
            "Speed of whole models over Inductor on the hand-written attention",
            [r["key"] for r in models],
            {title: [ratio(r, "inductor", name) for r in models] for name, title in names.items()},
            unit="times Inductor's speed",
            marks=[1.0],
        )
    if forms:
        drawn["attention-layers.svg"] = bar_chart(
            "Speed of single attention layers over the best kernel picked by hand",
            [r["key"] for r in forms],
            {
                "naive program, Inductor": [_percent(_of_best(r, "inductor")) for r in forms],
                "naive program, omni": [_percent(_of_best(r, OURS)) for r in forms],
            },
            unit="% of the best kernel's speed",
            marks=[90.0],
            digits=0,
        )
    return drawn


def ratio(record: Record, slow: str, fast: str) -> float | None:
    """Median over the rounds of one candidate's time over another's; None if one of them was not measured."""
    times = record["rounds"]
    if slow not in times or fast not in times:
        return None
    return Timing(rounds=tuple(times[slow])).ratio_to(Timing(rounds=tuple(times[fast])))


def better(record: Record) -> str | None:
    """The faster one of Inductor and transformers' sdpa with Inductor."""
    names = [name for name in ("inductor", "sdpa+inductor") if name in record["rounds"]]
    return min(names, key=lambda name: _milliseconds(record, name) or 0.0, default=None)


def _to_better(record: Record) -> float | None:
    name = better(record)
    return None if name is None else ratio(record, name, OURS)


def _median(record: Record) -> float:
    return _milliseconds(record, OURS) or 0.0


def _whole_graph(record: Record, models: Sequence[Record]) -> Record | None:
    """The row of the same model and mode as one graph."""
    same = ("model", "padded", "training", "setting")
    return next((r for r in models if not r.get("by_layer") and all(r.get(k) == record.get(k) for k in same)), None)


def best_kernel(record: Record) -> str | None:
    """The fastest kernel that was picked by hand and computes the form; None if there is none."""
    picked = [name for name in record["rounds"] if name not in PROGRAMS]
    return min(picked, key=lambda name: _milliseconds(record, name) or 0.0, default=None)


def _of_best(record: Record, name: str) -> float | None:
    best = best_kernel(record)
    return None if best is None else ratio(record, best, name)


def _part(records: Sequence[Record], part: str) -> list[Record]:
    return [record for record in records if record["part"] == part]


def _milliseconds(record: Record, name: str) -> float | None:
    rounds = record["rounds"].get(name)
    return None if rounds is None else Timing(rounds=tuple(rounds)).median * 1e3


def _targets(models: Sequence[Record], forms: Sequence[Record]) -> str:
    targets: list[Target] = []
    if models:
        whole = [r for r in models if not r.get("by_layer")]
        spelled = [r for r in whole if r.get("setting", "eager") == "eager"]
        called = [r for r in whole if r.get("setting") == "sdpa"]
        targets.append(_mean_target(spelled, "inductor", 2.0))
        targets.append(_mean_target(spelled, BETTER, 1.4))
        if called:
            targets.append(_mean_target(called, BETTER, 1.15))
        targets.append(_each(models, f"no model below 0.98 of the speed of {BETTER}", _to_better, 0.98))
        targets.append(_each(models, f"peak memory at most that of {BETTER}", lambda r: _memory(r, better(r)), 1.0))
        layers = [(r, _whole_graph(r, models)) for r in models if r.get("by_layer")]
        shares = {r["key"]: _median(other) / _median(r) for r, other in layers if other and _median(r)}
        if shares:
            claim = "compiled layer by layer at 0.97 of the speed of one graph"
            targets.append(_each([r for r, _ in layers], claim, lambda r: shares.get(r["key"]), 0.97))
    if forms:
        targets.append(_each(forms, "each layer at 0.90 of the best kernel", lambda r: _of_best(r, OURS), 0.9))
    both = [*models, *forms]
    targets.append(_each(both, "error at most twice eager's", _accuracy, 1.0))
    rows = [[t.claim, t.reached, "yes" if t.met else "**no**", ", ".join(t.short)] for t in targets]
    return markdown_table(["target", "reached", "met", "short"], rows)


def _mean_target(models: Sequence[Record], other: str, wanted: float) -> Target:
    def speed(record: Record) -> float | None:
        return _to_better(record) if other == BETTER else ratio(record, other, OURS)

    def mean(records: Iterable[Record]) -> float | None:
        ratios = [value for r in records if (value := speed(r)) is not None]
        return geometric_mean(ratios) if ratios else None

    every = mean(models)
    modes = {
        "inference": mean(r for r in models if not r["training"]),
        "training": mean(r for r in models if r["training"]),
    }
    count = sum(speed(r) is not None for r in models)
    setting = " called by sdpa" if models and models[0].get("setting") == "sdpa" else ""
    parts = ", ".join(f"{mode} {_number(value)}" for mode, value in modes.items())
    return Target(
        claim=f"{wanted} times the speed of {other}, geometric mean over the models{setting}",
        reached=f"{_number(every)} ({parts}; {count} rows)",
        met=every is not None and every >= wanted,
    )


def _each(records: Sequence[Record], claim: str, value_of: Callable[[Record], float | None], least: float) -> Target:
    values = {r["key"]: value for r in records if (value := value_of(r)) is not None}
    # A row in which omni itself failed misses every target.
    failed = tuple(f"{r['key']} (failed)" for r in records if OURS in r["failures"])
    short = failed + tuple(f"{key} ({value:.2f})" for key, value in values.items() if value < least)
    lowest = f", lowest {min(values.values()):.2f}" if values else ""
    return Target(
        claim=claim,
        reached=f"{sum(v >= least for v in values.values())} of {len(values) + len(failed)} rows{lowest}",
        met=bool(values) and not short,
        short=short,
    )


def _memory(record: Record, other: str | None) -> float | None:
    """Another candidate's peak over ours, where allocations of less than a MiB do not count."""
    theirs, ours = record["gib"].get(other or ""), record["gib"].get(OURS)
    if theirs is None or ours is None:
        return None
    return 1.0 if abs(theirs - ours) < 2**-10 else theirs / ours


def _accuracy(record: Record) -> float | None:
    """Error allowed over ours."""
    excess = record["excess"].get(OURS)
    return None if excess is None else 1 / max(excess, 1e-6)


def _models_table(models: Sequence[Record]) -> str:
    names = ("eager", "inductor", "sdpa+inductor", "flex+inductor", OURS)
    header = ["model", *(f"{name} ms" for name in names), "Inductor / omni", "sdpa / omni", "flex / omni"]
    header += ["peak GiB (Inductor / sdpa / flex / omni)", "error (eager / Inductor / sdpa / omni)", "sites fused"]
    rows = [
        [
            f"{r['key']}, {_sizes(r['size'])}",
            *(_number(_milliseconds(r, name)) for name in names),
            *(_number(ratio(r, name, OURS)) for name in names[1:4]),
            " / ".join(_number(r["gib"].get(name)) for name in names[1:]),
            " / ".join(_error(r["errors"], name) for name in ("eager", "inductor", "sdpa+inductor", OURS)),
            _sites(r),
        ]
        for r in models
    ]
    return markdown_table(header, rows)


def _sizes(size: Mapping[str, int]) -> str:
    tokens = f"{size['batch']} of {size['length']} tokens"
    return f"{size['layers']} layers, width {size['width']}, {size['heads']} heads, {tokens}"


def _forms_table(forms: Sequence[Record]) -> str:
    header = ["layer: form/heads/tokens/head size/mode", "eager ms", "Inductor ms", "omni ms (TFLOP/s)"]
    header += ["best kernel", "its ms (TFLOP/s)", "omni's share of its speed", "Inductor / omni"]
    header += ["peak GiB (best / omni)", "error (eager / best / omni)", "sites fused"]
    rows: list[list[str]] = []
    for r in forms:
        best = best_kernel(r) or ""
        share = _percent(_of_best(r, OURS))
        rows.append(
            [
                r["key"],
                _number(_milliseconds(r, "eager"), 3),
                _number(_milliseconds(r, "inductor"), 3),
                _rate(r, OURS),
                best,
                _rate(r, best),
                "" if share is None else f"{share:.0f} %",
                _number(ratio(r, "inductor", OURS)),
                " / ".join(_number(r["gib"].get(name)) for name in (best, OURS)),
                " / ".join(_error(r["errors"], name) for name in ("eager", best, OURS)),
                _sites(r),
            ]
        )
    return markdown_table(header, rows)


def _kernels_table(forms: Sequence[Record]) -> str:
    names = list(dict.fromkeys(name for r in forms for name in r["rounds"] if name not in PROGRAMS))
    rows = [[r["key"], *(_number(_milliseconds(r, name), 3) for name in names)] for r in forms]
    return markdown_table(["layer", *names], rows)


def _rate(record: Record, name: str) -> str:
    milliseconds = _milliseconds(record, name)
    return "" if milliseconds is None else f"{milliseconds:.3f} ({record['work'] / milliseconds / 1e9:.0f})"


def _sites(record: Record) -> str:
    sites = record.get("sites")
    if sites is None:
        return ""
    count = f"{sites['fused']} of {sites['fused'] + len(sites['missed'])}"
    if sites.get("called"):
        count += f", {sites['called']} as called"
    return f"{count}: {', '.join(sites['targets'])}" if sites["targets"] else count


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _error(errors: Mapping[str, float], name: str) -> str:
    return f"{errors[name]:.1e}" if name in errors else "-"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
