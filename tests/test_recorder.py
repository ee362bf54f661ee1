"""metrics.jsonl and TensorBoard: each step once, whenever the run was killed."""

import json

import tensorflow as tf

from keras_transformer.recorder import Recorder


def curves(run_dir):
    """Step and value of every "loss" that TensorBoard would show."""
    points = []
    for path in (run_dir / "tensorboard" / "curves").glob("events*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            points += [(event.step, float(tf.make_ndarray(v.tensor))) for v in event.summary.value if v.tag == "loss"]
    return points


def test_what_came_after_the_last_checkpoint_is_dropped_everywhere(tmp_path):
    """Steps 1, 2 and 3 and half a line; gone on from step 2, another 3: TensorBoard and the file have 3 but once."""
    recorder = Recorder(tmp_path, 0, False)
    for step in (1, 2, 3):
        recorder.write(step, {"loss": 0.5 * step})
    with recorder.path.open("a") as file:
        file.write('{"step": 4, "lo')
    Recorder(tmp_path, 2, False).write(3, {"loss": 8.0})
    expected = [(1, 0.5), (2, 1.0), (3, 8.0)]
    assert curves(tmp_path) == expected
    records = [json.loads(line) for line in recorder.path.read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in records] == expected


def test_the_mean_of_checkpoints_has_a_curve_of_its_own(tmp_path):
    """Measured at the run's last step: further on it stays, from there only if it is not measured again."""
    recorder = Recorder(tmp_path, 0, False)
    recorder.write(3, {"loss": 2.0})
    recorder.write(3, {"average": 5, "loss": 1.0})
    for step, averaged, left in ((4, False, 2), (3, True, 2), (3, False, 1)):
        assert len(Recorder(tmp_path, step, averaged).path.read_text().splitlines()) == left
        assert curves(tmp_path) == [(3, 2.0)]


def test_translations_are_a_table(tmp_path):
    Recorder(tmp_path, 0, False).write_translations(5, [("a | b", "c", "d")])
    [path] = (tmp_path / "tensorboard" / "translations").glob("events*")
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(path))]
    [text] = [tf.make_ndarray(value.tensor).item() for event in events for value in event.summary.value]
    assert text.decode().splitlines()[-1] == "| a \\| b | c | d |"
