"""Federated MAML against the centralised one, task by task."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from experiments import sine_meta_learning
import fednest_tff

RUNTIME = 'in_process'

HIDDEN, RATE, TASKS = (3, 2), 0.05, 4


def _tasks(**options):
  return sine_meta_learning.sample_tasks(
      TASKS, num_support=5, num_query=7, dtype=np.float64, **options
  )


def _network(x, inputs):
  """The network 1-3-2-1, its layers unpacked by hand."""
  w1, b1 = tf.reshape(x[0:3], [1, 3]), x[3:6]
  w2, b2 = tf.reshape(x[6:12], [3, 2]), x[12:14]
  w3, b3 = tf.reshape(x[14:16], [2, 1]), x[16:17]
  hidden = tf.tanh(inputs[:, None] @ w1 + b1)
  return (tf.tanh(hidden @ w2 + b2) @ w3 + b3)[:, 0]


def _maml(x, tasks):
  """The mean over tasks of the query loss after a step on the support."""
  losses = []
  for s_in, s_out, q_in, q_out in zip(*tasks, strict=True):
    with tf.GradientTape() as tape:
      tape.watch(x)
      support = tf.reduce_mean((_network(x, s_in) - s_out) ** 2)
    adapted = x - RATE * tape.gradient(support, x)
    losses.append(tf.reduce_mean((_network(adapted, q_in) - q_out) ** 2))
  return tf.add_n(losses) / len(losses)


STEP = 0.1


@functools.cache
def _process():
  problem = sine_meta_learning.sine_meta_learning(
      TASKS, HIDDEN, RATE, tf.float64
  )
  return fednest_tff.build(
      problem,
      outer_learning_rate=STEP,
      inner_learning_rate=1.0,
      inner_local_steps=1,
  )


def test_sampled_tasks_are_sine_curves():
  tasks = sine_meta_learning.sample_tasks(
      50, amplitudes=(1.0, 3.0), dtype=np.float64
  )
  assert [array.shape for array in tasks] == [(50, 10)] * 4
  inputs = np.concatenate([tasks.support_inputs, tasks.query_inputs], axis=1)
  targets = np.concatenate([tasks.support_targets, tasks.query_targets], 1)
  assert np.abs(inputs).max() < 5
  phases = []
  for u, v in zip(inputs, targets, strict=True):
    # a sin(u + b) = (a cos b) sin u + (a sin b) cos u, on all twenty points.
    basis = np.stack([np.sin(u), np.cos(u)], axis=1)
    (cosine, sine), rest, *_ = np.linalg.lstsq(basis, v, rcond=None)
    assert rest < 1e-20 and 1 < np.hypot(cosine, sine) < 3
    phases.append(np.arctan2(sine, cosine))
  assert 0 < min(phases) and max(phases) < np.pi and np.std(phases) > 0.5
  other = sine_meta_learning.sample_tasks(50, seed=1, dtype=np.float64)
  assert not np.any(other.query_targets == tasks.query_targets)


def test_adapted_loss_is_that_of_maml():
  tasks = _tasks()
  x = sine_meta_learning.initial_parameters(HIDDEN, 3, tf.float64)
  assert x.shape == [17]
  found = sine_meta_learning.adapted_loss(x, tasks, HIDDEN, RATE)
  np.testing.assert_allclose(found, _maml(x, tasks), rtol=1e-12)
  # With no step, the plain loss.
  plain = [
      np.mean((_network(x, u) - v) ** 2)
      for u, v in zip(tasks.query_inputs, tasks.query_targets, strict=True)
  ]
  found = sine_meta_learning.adapted_loss(x, tasks, HIDDEN, RATE, steps=0)
  np.testing.assert_allclose(found, np.mean(plain), rtol=1e-12)


def test_an_epoch_is_a_step_along_the_gradient_of_maml():
  tasks = _tasks()
  datasets = sine_meta_learning.to_datasets(tasks)
  process = _process()
  first = process.initialize()
  x = tf.constant(first.outer)
  with tf.GradientTape() as tape:
    tape.watch(x)
    loss = _maml(x, tasks)
  gradient = tape.gradient(loss, x)
  output = process.next(first, datasets)
  step = (first.outer - output.state.outer) / STEP
  np.testing.assert_allclose(step, gradient, rtol=1e-9, atol=1e-12)
  np.testing.assert_allclose(output.metrics['outer_loss'], loss, rtol=1e-12)
  # Second derivatives count: this is not first-order MAML.
  adapted = tf.constant(output.state.inner)
  with tf.GradientTape() as tape:
    tape.watch(adapted)
    losses = [
        tf.reduce_mean((_network(adapted[i], u) - v) ** 2)
        for i, (u, v) in enumerate(
            zip(tasks.query_inputs, tasks.query_targets, strict=True)
        )
    ]
    total = tf.add_n(losses) / TASKS
  np.testing.assert_allclose(total, loss, rtol=1e-12)
  first_order = tf.reduce_sum(tape.gradient(total, adapted), axis=0)
  assert np.linalg.norm(first_order - gradient) > 0.05 * np.linalg.norm(
      gradient
  )


@pytest.mark.usefixtures('compiled')
def test_training_lowers_the_loss_after_adaptation():
  tasks = _tasks(amplitudes=(0.5, 2.0))
  datasets = sine_meta_learning.to_datasets(tasks)
  process = _process()
  state = process.initialize()
  adapted_loss = tf.function(
      lambda x: sine_meta_learning.adapted_loss(x, tasks, HIDDEN, RATE)
  )
  losses = []
  for _ in range(150):
    losses.append(float(adapted_loss(tf.constant(state.outer))))
    state = process.next(state, datasets).state
  assert losses[-1] < 0.7 * losses[0]
  assert np.max(np.diff(losses)) < 1e-3
