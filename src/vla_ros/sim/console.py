"""Terminal output of ``vla-ros demo``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vla_ros.config import Config
from vla_ros.sim.report import headline
from vla_ros.sim.results import DemoResult, EpisodeResult

CONSOLE = Console(highlight=False)


def header(config: Config, where: str) -> None:
    """Print the policy and where it runs."""
    checkpoint = getattr(config.policy, "checkpoint", "")
    model = f" ({checkpoint})" if checkpoint else ""
    CONSOLE.print(f"policy [bold]{config.policy.name}[/]{escape(model)}, {where}", soft_wrap=True)


def spinner(text: str) -> AbstractContextManager[Any]:
    """Show a spinner with ``text``."""
    return CONSOLE.status(text)


@contextmanager
def progress(total: int) -> Iterator[Callable[[Sequence[EpisodeResult]], None]]:
    """Show a progress bar; call the yielded function with the results so far after each episode."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=CONSOLE, transient=True) as bar:
        task = bar.add_task("episodes", total=total)

        def update(results: Sequence[EpisodeResult]) -> None:
            last = results[-1]
            mark = "[green]success[/]" if last.success else f"[red]{last.reason}[/]"
            note = f" ({last.touched})" if last.touched else ""
            bar.console.print(
                f"seed {last.seed:5d}  {last.steps:3d} steps  {mark}{note}  {escape(last.instruction)}",
                soft_wrap=True,
            )
            share = sum(result.success for result in results) / len(results)
            bar.update(task, completed=len(results), description=f"episodes, {share:.0%} succeed")

        yield update


def summary(result: DemoResult) -> None:
    """Print the report's headline figures and the latency by stage."""
    won, mode = sum(episode.success for episode in result.episodes), result.mode.replace("_", " ")
    CONSOLE.print(f"\n[bold]{won} of {len(result.episodes)} episodes succeeded[/] ({mode}, {result.wall_s:.1f} s)")
    for title, figure, remark in headline(result):
        CONSOLE.print(f"{title}: {figure}, {remark}")
    if result.latency_ms:
        table = Table(title="latency in the policy node", title_justify="left")
        table.add_column("stage")
        for name in ("p50", "p99"):
            table.add_column(f"{name} (ms)", justify="right")
        for stage, values in result.latency_ms.items():
            table.add_row(stage, f"{values['p50']:.2f}", f"{values['p99']:.2f}")
        CONSOLE.print(table)


def wrote(what: str, path: Path) -> None:
    """Print where an output was written."""
    CONSOLE.print(f"{what}: {path}", markup=False, soft_wrap=True)
