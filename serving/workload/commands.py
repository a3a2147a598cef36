"""The commands `laneway replay`, `laneway compare` and `laneway trace`. Heavy imports wait until one is called."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from serving.spec import Spec
    from serving.workload.trace import Trace

CHECK_FAILED, BAD_INPUT, NO_ANSWER = 1, 2, 4
"""Exit codes: a check failed (the run is not to be trusted), bad input, a service that was needed did not answer."""

SpecPath = Annotated[Path, typer.Option("--spec", help="Lanes, objectives and strata.", envvar="LANEWAY_SPEC")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Format = Annotated[
    Literal["laneway", "timelines", "azure", "burstgpt", "mooncake"] | None,
    typer.Option("--format", help="The trace's format; without it, detected from the content."),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad-rows", help="Skip and count rows that cannot be read.")]
Seed = Annotated[int, typer.Option(help="Of generated traces, and of which requests are not streamed.")]

TRACE_HELP = """\
A trace file (Laneway's own, an access log or timelines.jsonl, Azure or BurstGPT CSV, Mooncake JSONL), or a generated \
mix: mix:short-behind-long?short=8&long=1.2&burst=8&every=10&seconds=60 or \
mix:steady-burst?rate=5&burst=20&every=20&lasts=3&seconds=60 (every parameter may be left out)."""
TraceName = Annotated[str, typer.Argument(metavar="TRACE", help=TRACE_HELP)]


def register(app: typer.Typer) -> None:
    """Adds the commands to the console script."""
    app.command("replay")(replay_command)
    app.command("compare")(compare_command)
    app.command("trace")(trace_command)


def replay_command(
    trace: TraceName,
    target: Annotated[str, typer.Option(help="Base URL of the gateway, or of any server of the OpenAI API.")],
    out: Annotated[Path, typer.Option(help="New folder for run.json, timelines.jsonl and report.html.")],
    duration: Annotated[
        float | None, typer.Option(help="Seconds after which no request starts.", min=0.1, max=86_400)
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Mean requests a second; the pattern stays.", min=0.001, max=100_000)
    ] = None,
    speed: Annotated[
        float | None, typer.Option(help="Run the trace's time so many times as fast.", min=0.001, max=100_000)
    ] = None,
    seed: Seed = 1,
    model: Annotated[str | None, typer.Option(help="The model; without it, the first that the target serves.")] = None,
    max_output: Annotated[int | None, typer.Option(help="Cap on output tokens.", min=1)] = None,
    max_prompt: Annotated[
        int | None, typer.Option(help="Cap on prompt tokens; the model's length caps them anyway.", min=1)
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The model's tokenizer.json, for exact prompt lengths; else by a probe.")
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run; also salts the prompts.")] = None,
    key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the API key.")] = None,
    kind: Format = None,
    skip_bad_rows: SkipBad = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for exactly the trace's output lengths.")] = True,
    no_stream: Annotated[
        float, typer.Option(help="Share of the requests that ask for a whole answer.", min=0, max=1)
    ] = 0.0,
    probe: Annotated[bool, typer.Option(help="Measure what words cost at the target with two small requests.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request's client leaves.", min=0.1)] = 900.0,
    grace: Annotated[float, typer.Option(help="Seconds to wait for answers after the last request.", min=0)] = 120.0,
    gateway_log: Annotated[
        Path | None, typer.Option(help="The gateway's access log: opens up the wait by stage.")
    ] = None,
    report_timings: Annotated[
        bool, typer.Option("--report-timings", help="Tell the gateway what the client saw, after the load.")
    ] = False,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A label that `compare` looks at.")
    ] = None,
    spec: SpecPath = Path("laneway.yaml"),
    as_json: Json = False,
) -> None:
    """Replay a trace open loop from the client's side, and report what users waited for.

    Exits with 1 where the client could not keep its schedule or the run was stopped: its figures are not to be trusted.
    """
    import asyncio
    import signal
    import uuid
    from urllib.parse import urlsplit

    import uvloop

    from serving.workload.live import run_with_progress, show_run
    from serving.workload.probe import TargetError
    from serving.workload.prompts import TokenizerError
    from serving.workload.record import RunError, make_folder
    from serving.workload.run import Plan
    from serving.workload.schedule import ScheduleError, Shape

    where = urlsplit(target)
    if where.scheme not in ("http", "https") or not where.hostname:
        _refuse(f"--target: got {target!r}, expected a URL such as http://127.0.0.1:8080")
    if where.username or where.password or where.query:
        _refuse("--target: has a user, a password or a query, expected none: an API key goes to --key-env")
    if rate is not None and speed is not None:
        _refuse("--rate and --speed: got both, expected only one of them")
    key = os.environ.get(key_env) if key_env else None
    if key_env and not key:
        _refuse(f"--key-env: the environment variable {key_env} is not set, expected the API key in it")
    read_spec = _read_spec(spec)
    read_trace = _read_trace(trace, seed, kind, skip_bad_rows, read_spec)
    plan = Plan(
        target=target,
        out=out,
        seed=seed,
        shape=Shape(rate, speed, duration, max_output, max_prompt, unstreamed=no_stream),
        run_id=run_id or uuid.uuid4().hex[:12],
        model=model,
        key=key,
        tokenizer=tokenizer,
        ignore_eos=ignore_eos,
        probe=probe,
        timeout=timeout,
        grace=grace,
        gateway_log=gateway_log,
        report_timings=report_timings,
        settings=_settings(setting or []),
    )

    async def go() -> Any:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        return await run_with_progress(plan, read_trace, read_spec, stop)

    try:
        make_folder(out)
        run = uvloop.run(go())
    except (RunError, ScheduleError, TokenizerError) as error:
        _refuse(str(error))
    except TargetError as error:
        typer.echo(error, err=True)
        raise typer.Exit(NO_ANSWER) from None
    show_run(out, as_json=as_json)
    if not run.trusted:
        raise typer.Exit(CHECK_FAILED)


def compare_command(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR DIR…", help="Folders of runs; the first is the base.")],
    html: Annotated[Path | None, typer.Option(help="Also write the comparison as a page.")] = None,
    as_json: Json = False,
) -> None:
    """Put runs side by side, lane by lane and prompt-length stratum by stratum."""
    from serving.workload.compare import compare
    from serving.workload.output import console_of_width, print_json
    from serving.workload.record import RunError, read_run
    from serving.workload.tables import compare_table, start_line

    try:
        comparison = compare([read_run(path) for path in runs])
    except (RunError, ValueError) as error:
        _refuse(str(error))
    if html is not None:
        from serving.workload.report import compare_page

        _write(html, "--html", compare_page(comparison))
    if as_json:
        print_json(comparison)
        return
    console = console_of_width()
    console.print(compare_table(comparison))
    for name, values in comparison.differences.items():
        console.print(f"differs: {name}: {', '.join(values)}", markup=False)
    for warning in comparison.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    for bar in comparison.start:
        console.print(start_line(bar), markup=False)
    if html is not None:
        console.print(f"page: {html}", markup=False)


def trace_command(
    trace: TraceName,
    out: Annotated[Path, typer.Option(help="File for the trace in Laneway's own format (JSON lines).")],
    seed: Seed = 1,
    kind: Format = None,
    skip_bad_rows: SkipBad = False,
    spec: SpecPath = Path("laneway.yaml"),
    as_json: Json = False,
) -> None:
    """Write a generated or recorded trace in Laneway's own format, to look at it, edit it or keep it."""
    from serving.workload.output import print_json
    from serving.workload.trace import write

    read = _read_trace(trace, seed, kind, skip_bad_rows, _read_spec(spec))
    try:
        write(read, out)
    except OSError as error:
        _refuse(f"--out: {out} cannot be written ({error.strerror}), expected a writable file")
    facts = {
        "file": str(out),
        "requests": len(read.requests),
        "seconds": round(read.span, 3),
        "prompt_tokens": sum(request.prompt_tokens for request in read.requests),
        "output_tokens": sum(request.output_tokens or 0 for request in read.requests),
        "skipped_rows": read.skipped_rows,
        "guessed_outputs": read.guessed_outputs,
    }
    if as_json:
        print_json(facts)
    else:
        typer.echo(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()))


def _read_spec(path: Path) -> "Spec":
    from serving import spec

    try:
        return spec.load(path)
    except ValueError as error:
        _refuse(str(error))


def _read_trace(name: str, seed: int, kind: Any, skip_bad: bool, spec: "Spec") -> "Trace":
    from serving.workload.readers import open_trace
    from serving.workload.trace import TraceError

    flex = frozenset(lane.name for lane in spec.lanes if lane.tier == "flex")
    try:
        trace = open_trace(name, seed=seed, kind=kind, skip_bad=skip_bad, flex_lanes=flex)
    except (TraceError, OSError) as error:
        _refuse(str(error))
    if trace.skipped_rows:
        typer.echo(f"{name}: skipped {trace.skipped_rows} bad rows", err=True)
    return trace


def _settings(pairs: list[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            _refuse(f"--set: got {pair!r}, expected NAME=VALUE")
        settings[name] = value
    return settings


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        _refuse(f"{option}: {path} cannot be written ({error.strerror}), expected a writable file")


def _refuse(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(BAD_INPUT)
