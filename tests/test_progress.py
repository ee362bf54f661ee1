"""Progress away from a terminal: lines with what is done, the rate, the time left."""

import logging

import pytest

from keras_transformer import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: clock[0] is its time in seconds."""
    time = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: time[0])
    return time


def test_rate_and_time_left(clock, caplog):
    """20 of 50 after 10 seconds: 2 a second, and 30 more take 15 seconds. Tokens have a rate of their own."""
    caplog.set_level(logging.INFO, "keras_transformer")
    work = progress.Progress("translate", 50, unit="lines")
    clock[0] += 10
    work.advance(20, tokens=300)
    work.show("well")
    assert caplog.messages == ["translate 20/50, 2.0 lines/s, 30 tokens/s, 0:15 left; well"]


def test_what_is_skipped_is_not_in_the_rate(clock, caplog):
    """One step of 60 seconds that builds the graph, then 4 in 2 seconds: 2 a second. Nothing is said of none."""
    caplog.set_level(logging.INFO, "keras_transformer")
    work = progress.Progress("train", 129, done=4)
    work.show("building")
    clock[0] += 60
    work.skip(1)
    work.show()
    clock[0] += 2
    work.advance(4)
    work.show()
    assert caplog.messages == [
        "train 4/129; building",
        "train 5/129",
        "train 9/129, 2.0 steps/s, 1:00 left",
    ]


def test_without_a_total_no_time_is_left(clock, caplog):
    caplog.set_level(logging.INFO, "keras_transformer")
    work = progress.Progress("translate", None, unit="lines")
    clock[0] += 4
    work.advance(8000)
    work.show()
    assert caplog.messages == ["translate 8000, 2,000.0 lines/s"]
