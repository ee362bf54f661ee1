"""Progress on stderr: a bar where a person looks at it, a line now and then elsewhere."""

import logging
import time

from rich import progress as rich_progress
from rich.console import Console
from rich.logging import RichHandler

log = logging.getLogger(__name__)
console = Console(stderr=True)
SECONDS_BETWEEN_LINES = 30


def show_logs() -> None:
    """Send the package's log to stderr: above the bar on a terminal, as plain lines elsewhere."""
    handler: logging.Handler = logging.StreamHandler(console.file)
    if console.is_terminal:
        handler = RichHandler(console=console, show_time=False, show_level=False, show_path=False, markup=False)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("keras_transformer")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class Progress:
    """How far a piece of work is, its rate and the time left.

    Args:
        name: what is being done.
        total: how much there is to do; None if that is not known.
        done: how much of it was done before.
        unit: what is counted.
        shown: False to keep quiet, where a person is typing.
    """

    def __init__(self, name: str, total: int | None, done: int = 0, unit: str = "steps", shown: bool = True):
        self.name, self.total, self.done, self.unit, self.tokens = name, total, done, unit, 0
        self.begin, self.at_begin, self.shown = time.perf_counter(), done, time.perf_counter()
        self.bar = rich_progress.Progress(
            "{task.description}",
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[rate]}"),
            rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
            rich_progress.TextColumn("{task.fields[note]}"),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self.task = self.bar.add_task(name, total=total, completed=done, rate="", note="")

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *error):
        self.bar.stop()

    def rate(self) -> float:
        return (self.done - self.at_begin) / max(1e-9, time.perf_counter() - self.begin)

    def rates(self) -> list[str]:
        """Nothing, where nothing was done yet."""
        if self.done == self.at_begin:
            return []
        tokens = self.tokens / max(1e-9, time.perf_counter() - self.begin)
        return [f"{self.rate():,.1f} {self.unit}/s", *([f"{tokens:,.0f} tokens/s"] if self.tokens else [])]

    def advance(self, count: int, tokens: int = 0) -> None:
        """So much more is done, and so many tokens of it, if they are counted."""
        self.done, self.tokens = self.done + count, self.tokens + tokens
        self.bar.update(self.task, completed=self.done, rate=", ".join(self.rates()))
        if time.perf_counter() - self.shown > SECONDS_BETWEEN_LINES and not console.is_terminal:
            self.show()

    def skip(self, count: int) -> None:
        """So much more is done, which took longer than the rest will: it and what was before count for no rate."""
        self.done += count
        self.begin, self.at_begin, self.tokens = time.perf_counter(), self.done, 0
        self.bar.update(self.task, completed=self.done)

    def show(self, note: str = "") -> None:
        """Say how it goes: beside the bar, or as a line with the time left."""
        if console.is_terminal:
            self.bar.update(self.task, note=note)
            return
        self.shown = time.perf_counter()
        done = f"{self.name} {self.done}" + (f"/{self.total}" if self.total is not None else "")
        parts = [done, *self.rates()]
        if self.total is not None and self.rate():
            minutes, seconds = divmod(round((self.total - self.done) / self.rate()), 60)
            parts.append(f"{minutes}:{seconds:02} left")
        log.info("%s%s", ", ".join(parts), note and f"; {note}")
