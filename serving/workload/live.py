"""What a person sees of a replay: what is being done, a bar while the load runs, and then the table and the report."""

import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from serving.spec import Spec
from serving.workload import replay
from serving.workload.compare import start_bars
from serving.workload.output import console_of_width, print_json
from serving.workload.record import REPORT_FILE, Run, read_run
from serving.workload.report import run_page
from serving.workload.run import Plan, run_replay
from serving.workload.summary import summarize
from serving.workload.tables import run_table, start_line
from serving.workload.trace import Trace


async def run_with_progress(plan: Plan, trace: Trace, spec: Spec, stop: asyncio.Event) -> Run:
    """`run_replay`, with its progress on the terminal (standard error, so that output can be piped).

    Raises:
        TargetError, ScheduleError, TokenizerError: as `run_replay`.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("sent {task.fields[sent]} of {task.total}"),
        BarColumn(),
        TextColumn("{task.completed} answered"),
        TimeElapsedColumn(),
        console=console,
        # No thread draws on its own: it would hold the interpreter just when a request is due.
        auto_refresh=False,
        disable=not console.is_terminal,
    )
    task = bar.add_task("replay", total=len(trace.requests), sent=0)

    def tell(progress: replay.Progress) -> None:
        bar.update(task, completed=progress.ended, total=progress.total, sent=progress.due, refresh=True)

    def say(text: str) -> None:
        console.print(text, style="dim", markup=False)

    with bar:
        return await run_replay(plan, trace, spec, stop, say=say, tell=tell)


def show_run(out: Path, *, as_json: bool) -> None:
    """Writes the report and prints the table, both from what stands in the run's folder.

    Raises:
        RunError: the folder cannot be read.
    """
    folder = read_run(out)
    run = folder.run
    groups = summarize(folder.timelines, run.lanes, run.strata, run.window, run.elapsed)
    report = out / REPORT_FILE
    report.write_text(run_page(folder), encoding="utf-8")
    if as_json:
        print_json({"run": run.model_dump(mode="json"), "groups": groups, "report": str(report)})
        return
    console = console_of_width()
    console.print(run_table(run, groups))
    for bar in start_bars(run.run_id, folder):
        console.print(start_line(bar), markup=False)
    console.print(f"report: {report}", markup=False)
