"""Shows episodes on the terminal as they end."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from vla_ros.config import Config
from vla_ros.errors import printable
from vla_ros_lab.eval.results import Score, summary_of


class ProgressList:
    """A bar, and a line for each episode; a context manager.

    Attributes:
        scores: The episodes so far, by task and state.
        config: Options of the node, once it runs in this process.
    """

    config: Config | None = None

    def __init__(self, console: Console, scores: Iterable[Score] = ()) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._shown = self._bar.add_task("episodes", total=None)
        self.scores = {score.key: score for score in scores}

    def __enter__(self) -> "ProgressList":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def say(self, *lines: str) -> None:
        for line in lines:
            self._bar.console.print(escape(printable(line)), soft_wrap=True)

    def expect(self, total: int) -> None:
        """Tell the number of all episodes."""
        self._bar.update(self._shown, total=total)

    def add(self, score: Score) -> None:
        """Show an episode that has ended."""
        colour, name = "red", (score.reason or "failure").replace("_", " ")
        if score.success is not False:
            colour, name = ("yellow", "error") if score.success is None else ("green", "success")
        notes = [f" ({score.touched})"] if score.touched else []
        notes += [f"  {text}" for text in (score.error or score.instruction,) if text]
        self._bar.console.print(
            f"{escape(printable(score.task))} {score.state}  {score.steps} steps  [{colour}]{name}[/]"
            f"{escape(printable(''.join(notes)))}",
            soft_wrap=True,
        )
        self.scores[score.key] = score
        text = f"episodes, {summary_of(list(self.scores.values())).rate:.0%} succeed"
        self._bar.update(self._shown, completed=len(self.scores), description=text)
