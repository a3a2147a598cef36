"""A replay as a person watches it: what is being done, and a bar while the load runs."""

import asyncio

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from serving.spec import Spec
from serving.workload import replay
from serving.workload.record import Run
from serving.workload.run import Plan, run_replay
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
