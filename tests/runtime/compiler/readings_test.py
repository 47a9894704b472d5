"""Readings: found, run before the function, kept if they cannot change."""

import gc

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import in_process
from fednest_tff.runtime.compiler import call_dominant, readings
from tests.runtime.comparison import at_clients, at_server, run_in_process

SEQUENCE = tff.SequenceType(np.float32)


@tff.tensorflow.computation(SEQUENCE)
def total(dataset):
  return dataset.reduce(0.0, lambda a, b: a + b)


@tff.tensorflow.computation(np.float32, np.float32)
def add(a, b):
  return a + b


@tff.federated_computation(at_server(np.float32), at_clients(SEQUENCE))
def sum_of_totals(start, datasets):
  totals = tff.federated_map(total, datasets)
  shifted = tff.federated_map(add, (totals, tff.federated_broadcast(start)))
  return tff.federated_sum(shifted)


@tff.federated_computation(at_clients(SEQUENCE))
def totals_and_datasets(datasets):
  return tff.federated_sum(tff.federated_map(total, datasets)), datasets


def find(computation):
  return call_dominant.to_call_dominant(computation).readings


def test_calls_that_take_only_what_clients_gave():
  found = find(sum_of_totals)
  assert [reading.leaf for reading in found.calls] == [1]
  assert found.calls[0].is_constant
  assert found.calls[0].member == tff.TensorType(np.float32)
  # Nothing else needs the datasets.
  assert found.unused == {1}
  # Here the result does.
  found = find(totals_and_datasets)
  assert len(found.calls) == 1 and found.unused == frozenset()


def test_random_numbers_are_not_constant():
  @tff.tensorflow.computation(SEQUENCE)
  def noisy(dataset):
    return dataset.reduce(0.0, lambda a, b: a + b) + tf.random.uniform([])

  @tff.federated_computation(at_clients(SEQUENCE))
  def sums(datasets):
    return tff.federated_sum(tff.federated_map(noisy, datasets))

  (reading,) = find(sums).calls
  assert not reading.is_constant


def test_a_shuffle_is_read_again():
  @tff.tensorflow.computation(SEQUENCE)
  def first_after_shuffle(dataset):
    return dataset.shuffle(100).take(1).reduce(0.0, lambda a, b: a + b)

  @tff.federated_computation(at_clients(SEQUENCE))
  def first(datasets):
    return tff.federated_map(first_after_shuffle, datasets)

  (reading,) = find(first).calls
  assert not reading.is_constant
  data, runtime = [dataset_of(*range(100))], in_process.InProcessRuntime()
  found = {
      float(run_in_process(runtime, lambda: first(data))[0]) for _ in range(8)
  }
  assert len(found) > 1


def dataset_of(*numbers):
  return tf.data.Dataset.from_tensor_slices(np.float32(numbers))


def test_a_variable_may_change():
  factor = tf.Variable(2.0)
  dataset = dataset_of(1, 2).map(lambda x: factor * x)
  runtime = in_process.InProcessRuntime()

  def run():
    return run_in_process(runtime, lambda: sum_of_totals(0.0, [dataset]))

  assert run() == 6.0
  factor.assign(3.0)
  assert run() == 9.0


def test_datasets_are_read_once_while_they_are_there(monkeypatch):
  calls = []
  build = readings._build_function

  def counted(graph, member):
    function = build(graph, member)
    return lambda *args: calls.append(1) or function(*args)

  monkeypatch.setattr(readings, '_build_function', counted)
  runtime = in_process.InProcessRuntime()
  one, two = dataset_of(1, 2), dataset_of(3)

  def run(start, *given):
    return run_in_process(runtime, lambda: sum_of_totals(start, list(given)))

  assert run(0.0, one, two) == 6.0
  assert len(calls) == 2
  assert run(1.0, two, one, one) == 12.0
  assert len(calls) == 2
  assert run(0.0, dataset_of(1, 2)) == 3.0
  assert len(calls) == 3
  shuffled = one.shuffle(2)
  assert run(0.0, shuffled) == run(0.0, shuffled) == 3.0
  assert len(calls) == 5
  runtime.forget()
  assert run(0.0, one) == 3.0
  assert len(calls) == 6


def test_what_was_read_goes_with_the_dataset():
  reader = readings.Reader()
  (reading,) = find(sum_of_totals).calls
  datasets = [dataset_of(1, 2), dataset_of(3)]
  found = reader.read(reading, datasets, SEQUENCE)
  assert [float(row[0]) for row in found] == [3.0, 3.0]
  assert len(reader._kept) == 2
  del datasets
  gc.collect()
  assert len(reader._kept) == 0


def test_memory_is_bounded(monkeypatch):
  monkeypatch.setattr(readings, '_MAX_BYTES', 8)
  reader = readings.Reader()
  (reading,) = find(sum_of_totals).calls
  datasets = [dataset_of(k) for k in range(5)]
  for dataset in datasets:
    reader.read(reading, [dataset], SEQUENCE)
  assert 1 <= len(reader._kept) <= 2


def test_results_of_datasets_that_are_gone_do_not_count(monkeypatch):
  monkeypatch.setattr(readings, '_MAX_BYTES', 8)
  reader, kept = readings.Reader(), []
  for _ in range(3):  # Four bytes each; only the last two stay.
    kept = [*kept[-1:], dataset_of(1)]
    gc.collect()
    reader._keep(kept[-1], b'key', [tf.constant(1.0)])
  assert list(reader._kept) == kept
