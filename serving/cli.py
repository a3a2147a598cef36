"""The command `laneway`. Each command's work is in its own part; nothing heavy is imported for --help."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from serving.engine.commands import engine_app
from serving.workload.commands import register as register_workload

app = typer.Typer(
    help="Traffic lanes in front of vLLM: bounded queues, deadlines and token-aware batches, observed to the engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(engine_app, name="engine", help="Run one replica: real vLLM, or a simulated one.")
register_workload(app)

SpecPath = Annotated[Path, typer.Option("--spec", help="The spec.", envvar="LANEWAY_SPEC")]
DEFAULT_SPEC = Path("laneway.yaml")
BAD_INPUT = 2


@app.command()
def serve(
    spec: SpecPath = DEFAULT_SPEC,
    host: Annotated[str, typer.Option(help="Address to listen on; off loopback, keys are required.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65_535)] = 8080,
    gateway_scheduler: Annotated[
        Literal["lanes", "passthrough", "static-fifo"] | None,
        typer.Option(help="Use this scheduler in every pool, whatever the spec says."),
    ] = None,
    access_log: Annotated[
        Path | None, typer.Option(help="Write access lines and events here instead of standard output.")
    ] = None,
) -> None:
    """The gateway: OpenAI-compatible, with a lane and a queue for each kind of traffic."""
    from serving import spec as spec_file
    from serving.gateway import server
    from serving.spec import Spec
    from serving.telemetry.logs import Logs

    def adjust(read: Spec) -> Spec:
        if gateway_scheduler is None:
            return read
        pools = tuple(pool.model_copy(update={"gateway_scheduler": gateway_scheduler}) for pool in read.pools)
        return read.model_copy(update={"pools": pools})

    try:
        read = spec_file.load(spec)
        server.check_exposed(host, read)
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(BAD_INPUT) from None
    logs = Logs(access_log)
    try:
        server.run(spec, read, adjust, host, port, logs)
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(BAD_INPUT) from None
    finally:
        logs.close()


@app.command("spec")
def spec_command(
    spec: SpecPath = DEFAULT_SPEC,
    explain: Annotated[bool, typer.Option("--explain", help="Print every field: unit, bounds, default.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole spec, defaults filled in.")] = False,
) -> None:
    """Check the spec, or explain its fields."""
    from serving import spec as spec_file

    if explain:
        from rich.console import Console
        from rich.table import Table

        table = Table("field", "value", "default", "meaning", title="laneway.yaml", title_justify="left")
        for row in spec_file.explain():
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 160).print(table)
        return
    try:
        read = spec_file.load(spec)
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(BAD_INPUT) from None
    if as_json:
        typer.echo(read.model_dump_json(indent=2))
    else:
        lanes = ", ".join(lane.name for lane in read.lanes)
        typer.echo(f"{spec}: good (digest {read.digest}; lanes {lanes})")


@app.command()
def key() -> None:
    """Make an API key: give the key to its user, and put the digest into gateway.auth.keys of the spec."""
    from serving.gateway.keys import new_key

    secret, digest = new_key()
    typer.echo(f"key     {secret}\nsha256  {digest}")


if __name__ == "__main__":
    app()
