"""Several GPUs, and several machines: one strategy, one sequence of batches, one worker that writes.

Every worker runs the same command on the same run folder, on a file system that all of them see. `TF_CONFIG` tells each
who the others are, as TensorFlow documents it. A worker that is lost ends the job; started again, all of them go on
from the last checkpoint.
"""

import contextlib
import json
import os

import tensorflow as tf

from keras_transformer.errors import UsageError, UserError, first_line


class WorkerLost(UserError):
    """Another worker of the job is gone."""


def make_strategy() -> tf.distribute.Strategy:
    """All workers of TF_CONFIG, all GPUs, or the one device.

    Raises:
        UsageError: TF_CONFIG is not what TensorFlow takes, or comes too late.
    """
    try:
        cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster")
        if cluster:
            return tf.distribute.MultiWorkerMirroredStrategy()
    except (ValueError, AttributeError, RuntimeError, tf.errors.OpError) as error:
        raise UsageError(f"TF_CONFIG: {first_line(error)}") from error
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()


def worker_of(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """The number of this worker, counted from 0, and how many there are."""
    resolver = strategy.cluster_resolver
    if resolver is None or not resolver.cluster_spec():
        return 0, 1
    jobs = resolver.cluster_spec().as_dict()
    tasks = [(job, number) for job in ("chief", "worker") for number in range(len(jobs.get(job, ())))]
    return tasks.index((resolver.task_type, resolver.task_id)), len(tasks)


def make_total(strategy: tf.distribute.Strategy):
    """A function that adds up a number over the workers, each of which must call it; so it is also where all meet."""
    if worker_of(strategy)[1] == 1:
        return lambda number: number
    replicas = strategy.num_replicas_in_sync // worker_of(strategy)[1]

    @tf.function(input_signature=[tf.TensorSpec((), tf.float32)], autograph=False)
    def total(number):
        found = strategy.run(lambda: tf.identity(number))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, found, None) / replicas

    return lambda number: float(total(float(number)))


@contextlib.contextmanager
def workers_present():
    """Inside the block, what TensorFlow raises when another worker is gone becomes one line.

    Raises:
        WorkerLost
    """
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError) as error:
        if not os.environ.get("TF_CONFIG"):
            raise
        raise WorkerLost(
            "another worker of this job is gone or cannot be reached; start all of them again with the same command: "
            "they go on from the last checkpoint"
        ) from error


def distribute(strategy: tf.distribute.Strategy, make_batches):
    """The data set that `make_batches(worker, workers, replicas)` makes for this worker, handed out to its replicas."""
    worker, workers = worker_of(strategy)
    replicas = strategy.num_replicas_in_sync // workers
    if strategy.num_replicas_in_sync == 1:
        return make_batches(worker, workers, replicas)
    return strategy.distribute_datasets_from_function(lambda context: make_batches(worker, workers, replicas))


def spread_seeds(strategy: tf.distribute.Strategy, variables: list) -> None:
    """Give each replica dropout of its own: the states of random numbers are made, and restored, alike on all."""
    if strategy.num_replicas_in_sync == 1:
        return
    states = [variable.value for variable in variables if variable.path.endswith("seed_generator_state")]

    def spread():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        for state in states:
            state.assign_add(tf.cast(tf.stack([replica, 0]), state.dtype))

    strategy.run(spread)
