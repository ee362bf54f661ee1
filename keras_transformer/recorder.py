"""Figures of a run: lines of metrics.jsonl, and TensorBoard."""

import json
from pathlib import Path

import tensorflow as tf

from keras_transformer.files import whole


class Recorder:
    """Writes a run's figures as they come.

    What a killed run had measured after its last checkpoint is measured again: here it is dropped. Figures of a mean of
    checkpoints have their number as `average`.

    Args:
        run_dir: the run folder.
        step: the update from which the run goes on.
        averaged: whether the mean of checkpoints was measured at that update and is not measured again.
    """

    def __init__(self, run_dir: Path, step: int, averaged: bool):
        self.path = run_dir / "metrics.jsonl"
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        records = [record for record in map(read_record, lines) if record]
        records = [record for record in records if record["step"] <= step - ("average" in record and not averaged)]
        with whole(self.path) as beside:
            beside.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        # TensorBoard would show a step that is measured twice twice: its files are written anew.
        curves = run_dir / "tensorboard" / "curves"
        for old in curves.glob("*"):
            old.unlink()
        self.curves = tf.summary.create_file_writer(str(curves))
        self.texts = tf.summary.create_file_writer(str(run_dir / "tensorboard" / "translations"))
        for record in records:
            self.draw(record)
        self.curves.flush()

    def draw(self, record: dict[str, float]) -> None:
        with self.curves.as_default(record["step"]):
            for name, value in record.items():
                if name not in ("step", "average"):
                    tf.summary.scalar(f"average_{name}" if "average" in record else name, value)

    def write(self, step: int, figures: dict[str, float]) -> None:
        record = {"step": step, **figures}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.draw(record)
        self.curves.flush()

    def write_translations(self, step: int, rows: list[tuple[str, str, str]]) -> None:
        """A table of (source, translation, reference) for TensorBoard's page of texts."""
        lines = ["| source | translation | reference |", "| --- | --- | --- |"]
        lines += ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
        with self.texts.as_default(step):
            tf.summary.text("dev", "\n".join(lines))
        self.texts.flush()


def read_record(line: str) -> dict[str, float] | None:
    """A line of metrics.jsonl; None if it is cut short."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
