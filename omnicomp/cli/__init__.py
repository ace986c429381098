"""The command line: `omnicomp run`, `audit`, `diff`, `check`, `verify`, `bisect`, `cache`, `doctor` and others.

Exit status: 0 if all is well, 1 if the user's program failed or something needed is missing, 2 for bad input,
3 if a timeline tells of something that has no end. A program that ends itself keeps its own status.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from omnicomp.audit.views import VIEWS
from omnicomp.audit.views.layout import fitted
from omnicomp.cli.output import emit, number
from omnicomp.errors import OmnicompError
from omnicomp.safety.escapes import one_line
from omnicomp.safety.privacy import cleaner

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Say what torch.compile's backend omni ran where, and why.",
)


def main() -> None:
    """Run the command line; an `OmnicompError` is printed as one sentence."""
    try:
        app(prog_name="omnicomp")
    except OmnicompError as error:
        print(f"omnicomp: error: {one_line(cleaner().text(str(error)))}", file=sys.stderr)
        sys.exit(2)


class _RunCommand(TyperCommand):
    """`-m module` ends the options, as it does for Python: what follows belongs to the module."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with_value = {"--audit", "--dump", "--timeline", "--option", "--mode"}
        index = 0
        while index < len(args) and args[index].startswith("-") and args[index] != "--":
            if args[index] == "-m":
                args = [*args[: index + 2], "--", *args[index + 2 :]]
                break
            index += 2 if args[index] in with_value else 1
        return super().parse_args(ctx, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        import omnicomp

        print(f"omnicomp {omnicomp.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Say what torch.compile's backend omni ran where, and why."""


@app.command("run", cls=_RunCommand, context_settings={"allow_interspersed_args": False})
def run_command(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]", help="The script and its own arguments.")
    ] = None,
    module: Annotated[str | None, typer.Option("-m", help="Run a module instead, as python -m does.")] = None,
    audit: Annotated[Path | None, typer.Option(help="Write the audit to a .html, .json or .txt file.")] = None,
    timeline: Annotated[
        str | None, typer.Option(help="Write the events to a JSON Lines file (%p pid, %r rank, %h host).")
    ] = None,
    dump: Annotated[Path | None, typer.Option(help="Write the graph after each stage to this folder.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of omni or Inductor.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="torch.compile's mode for every call.")] = None,
) -> None:
    """Run a program with torch.compile sent to omni."""
    from omnicomp.cli.run import Program, parse_options, run

    words = list(program or [])
    if module is None and not words:
        raise OmnicompError("run needs a script, or -m and a module; see omnicomp run --help")
    chosen = Program(
        target=words[0] if module is None else module,
        module=module is not None,
        arguments=tuple(words[1:] if module is None else words),
    )
    code = run(chosen, audit_path=audit, timeline=timeline, dump=dump, mode=mode, options=parse_options(option or []))
    raise typer.Exit(code)


@app.command("audit")
def audit_command(
    timeline: Annotated[Path, typer.Argument(help="A timeline, an audit as JSON, or a folder of timelines.")],
    format: Annotated[str | None, typer.Option(help=f"{', '.join(VIEWS)}; text if not told.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show it by module path.")] = False,
    by: Annotated[
        str | None, typer.Option(metavar="WHAT", help="What the tree counts: flops, time, operators or bytes.")
    ] = None,
    why: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Why a module, operator, node, subgraph, line, pass or option is as it is."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto to this file.")] = None,
    source: Annotated[bool, typer.Option(help="Lines of source in the HTML page.")] = True,
    full: Annotated[bool, typer.Option("--full", help="Every row, and tables of passes, options and caches.")] = False,
) -> None:
    """Make an audit from a timeline file."""
    from omnicomp.cli.audit import run_audit

    views: dict[str, Any] = {"tree": tree, "by": by, "question": why, "trace": trace, "excerpts": source}
    views["full"] = full
    run_audit(timeline, format=format, output=output, **views)


@app.command("diff")
def diff_command(
    before: Annotated[Path, typer.Argument(metavar="A", help="A timeline, or an audit as JSON.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="What to compare it with, likewise.")],
    format: Annotated[str | None, typer.Option(help="text, json, markdown or summary; text if not told.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
    time_threshold: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Growth of a time that is a difference; none if not told.")
    ] = None,
    memory_threshold: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Growth of memory that is one, likewise.")
    ] = None,
) -> None:
    """Say what differs between two runs. The exit status is 0 if nothing does, and else 1."""
    from omnicomp.cli.diff import run_diff

    limits = {
        "time_percent": number("--time-threshold", time_threshold, float, "a percentage", "20"),
        "memory_percent": number("--memory-threshold", memory_threshold, float, "a percentage", "20"),
    }
    raise typer.Exit(run_diff(before, after, format=format, output=output, **limits))


@app.command("check")
def check_command(
    report: Annotated[Path, typer.Argument(help="A timeline, an audit as JSON, or a folder of timelines.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="OLD", help="Likewise; only what it does not have counts.")
    ] = None,
    max_nodes: Annotated[
        str | None, typer.Option(metavar="N", help="How many operators may run eager; 0 if no bound is told.")
    ] = None,
    max_flops_share: Annotated[
        str | None, typer.Option(metavar="F", help="Which part of the FLOPs they may have, such as 0.01.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="SELECTOR", help="Operators and modules that don't count.")
    ] = None,
    allow_unfinished: Annotated[
        bool, typer.Option("--allow-unfinished", help="Pass a run that was killed, or of which a part never ran.")
    ] = False,
    format: Annotated[str | None, typer.Option(help="text, markdown, github, junit or json; text if not told.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
) -> None:
    """Judge what fell back to eager. The exit status is 0 within the budget, 1 over it, 3 without an end or a graph."""
    from omnicomp.cli.check import run_check

    code = run_check(
        report,
        baseline=baseline,
        max_nodes=number("--max-nodes", max_nodes, int, "a number of operators", "0"),
        max_flops_share=number("--max-flops-share", max_flops_share, float, "a part from 0 to 1", "0.3 for 30 %"),
        allow=allow or (),
        allow_unfinished=allow_unfinished,
        format=format,
        output=output,
    )
    raise typer.Exit(code)


@app.command("verify")
def verify_command(
    timeline: Annotated[Path, typer.Argument(help="A timeline of a run with the option certify.")],
) -> None:
    """Check again what passes changed. The exit status is 0 if all of it holds, and else 1."""
    from omnicomp.cli.verify import run_verify

    raise typer.Exit(run_verify(timeline))


@app.command("bisect")
def bisect_command(
    script: Annotated[Path | None, typer.Argument(help="A script that omnicomp wrote about a failure.")] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Forget what is known, or what the script shows.")] = False,
) -> None:
    """List what is known to fail here, or repeat and narrow one failure."""
    from omnicomp.cli.bisect import forget_known, list_known, run_script

    if forget:
        emit(forget_known(script))
    elif script is None:
        emit(fitted(list_known()))
    else:
        raise typer.Exit(run_script(script, lambda line: emit(f"{line}\n")))


@app.command("doctor")
def doctor_command(
    device: Annotated[str | None, typer.Option(help="Check this device only; it must be there.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what omni needs on this machine."""
    from omnicomp.cli.doctor import enable_simulated, examine, to_json, to_text

    enable_simulated(device)
    found = examine(device)
    status = 1 if any(check.status == "missing" for check in found) else 0
    raise typer.Exit(emit(to_json(found) if json else fitted(to_text(found)), status=status))


@app.command("bringup")
def bringup_command(
    model: Annotated[
        str,
        typer.Argument(help="bert, llama, vit, t5, resnet, unet, or file.py:function of a module and inputs."),
    ],
    device: Annotated[str, typer.Option(help="The device type.")],
    json: Annotated[Path | None, typer.Option(help="Write the table to this JSON file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the table to this HTML file.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Take the backward as well.")] = False,
    lowering: Annotated[list[str] | None, typer.Option(help="Only these lowerings of omni.")] = None,
    size: Annotated[str, typer.Option(help="Size of omnicomp's own models: tiny, cpu or gpu.")] = "tiny",
    setup: Annotated[str, typer.Option(metavar="FILE.PY:FUNCTION", help="Called first.")] = "",
) -> None:
    """Take every operator of a model through the steps on a device; say what to write next."""
    from omnicomp.cli.bringup import run_bringup

    code = run_bringup(
        model, device, size=size, training=train, lowerings=lowering or (), setup=setup, json=json, html=html
    )
    raise typer.Exit(code)


@app.command("conformance")
def conformance_command(
    device: Annotated[str, typer.Argument(help="The device type.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small choice of operators and models.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the checks to this JSON file.")] = None,
    operators: Annotated[str, typer.Option(metavar="PATTERNS", help="Only these operators, by shell patterns.")] = "",
    group: Annotated[list[str] | None, typer.Option(help="Only these groups of checks.")] = None,
    setup: Annotated[str, typer.Option(metavar="FILE.PY:FUNCTION", help="Called first.")] = "",
) -> None:
    """Check that a device keeps what torch and omnicomp ask of it."""
    from omnicomp.cli.conformance import run_conformance

    code = run_conformance(device, quick=quick, setup=setup, operators=operators, groups=group, json=json)
    raise typer.Exit(code)


cache_app = typer.Typer(no_args_is_help=True, help="Files of artefacts, and the cache folders that they are made of.")
app.add_typer(cache_app, name="cache")
_File = Annotated[Path, typer.Argument(metavar="FILE", help="The file of artefacts.")]
_MaybeFile = Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A file of artefacts; else this machine.")]


@cache_app.command("export")
def cache_export_command(file: _File) -> None:
    """Write all that the cache folders hold to one file."""
    from omnicomp.cli.cache import export_file

    emit(export_file(file))


@cache_app.command("import")
def cache_import_command(file: _File) -> None:
    """Fill the cache folders from a file. The exit status is 1 if it was made for something else."""
    from omnicomp.cli.cache import import_file

    text, missed = import_file(file)
    raise typer.Exit(emit(text, status=int(missed)))


@cache_app.command("list")
def cache_list_command(file: _MaybeFile = None) -> None:
    """List the entries of a file, or of the cache folders."""
    from omnicomp.cli.cache import list_entries

    emit(list_entries(file))


@cache_app.command("info")
def cache_info_command(file: _MaybeFile = None) -> None:
    """Say what a file was made for and whether it fits here, or where the cache folders are and how full."""
    from omnicomp.cli.cache import describe

    emit(describe(file))


@cache_app.command("prune")
def cache_prune_command(
    days: Annotated[str | None, typer.Option(metavar="N", help="Remove what was not used for N days.")] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="N", help="Remove what was not used for the longest time, until N are left.")
    ] = None,
) -> None:
    """Remove files of the cache folders. What is needed again is compiled again."""
    from omnicomp.cli.cache import prune

    emit(
        prune(
            number("--days", days, float, "a number of days", "30"),
            number("--max-bytes", max_bytes, int, "a number of bytes", "10000000000"),
        )
    )


new_app = typer.Typer(no_args_is_help=True, help="Write a package to start from.")
app.add_typer(new_app, name="new")


@new_app.command("device")
def new_device_command(
    name: Annotated[str, typer.Argument(help="The device type, as torch is to name it.")],
    path: Annotated[Path, typer.Option(help="The folder that omnicomp-NAME is made in.")] = Path(),
) -> None:
    """Write a package for a device from outside: contract, C++ driver, Inductor, tests."""
    from omnicomp.cli.new import next_steps, write_device

    written = write_device(name, path)
    print("\n".join(map(str, written)))
    print(f"\nNext:\n{next_steps(name, path / f'omnicomp-{name}')}")


@new_app.command("engine")
def new_engine_command(
    name: Annotated[str, typer.Argument(help="What options are to call the engine by.")],
    path: Annotated[Path, typer.Option(help="The folder that omnicomp-NAME is made in.")] = Path(),
) -> None:
    """Write a package for an engine: operators, executable, tests."""
    from omnicomp.cli.new import next_engine_steps, write_engine

    written = write_engine(name, path)
    print("\n".join(map(str, written)))
    print(f"\nNext:\n{next_engine_steps(name, path / f'omnicomp-{name}')}")
