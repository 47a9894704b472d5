"""Personal heads over a shared backbone: data, baseline, evaluation, binary."""

import json

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest
import tensorflow as tf

from experiments import (
    image_clients,
    learning_problems,
    personalization,
    program,
)
import fednest_tff
from fednest_tff import simulation
from fednest_tff.local import derivatives
from tests.helpers import resuming

EXPERIMENT = personalization.EXPERIMENT
ACCURACIES = [
    'client_accuracy_mean', 'client_accuracy_decile', 'shared_accuracy_mean',
    'shared_accuracy_decile',
]
SMALL = dict(
    epochs=2, compiled=False, num_clients=4, clients_per_round=3, hidden=['6'],
    inner_local_steps=3, neumann_terms=2,
)


def _settings(**chosen):
  found = EXPERIMENT.resolve(SMALL | dict(method=['personal']) | chosen)
  return personalization._with_partition(found)


def _run(directory, **chosen):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(output_dir=str(directory), **chosen):
    return program.main(EXPERIMENT, ['x'])


# The data.


def test_a_fifth_of_each_clients_images_is_held_out():
  settings = _settings()
  assert settings.partition == 'shards'
  images, clients = personalization.divide(settings, 3)
  whole = image_clients.make_data(settings, 3).arrays.values()
  assert len(clients) == 4
  for client, (all_images, all_labels) in zip(clients, whole, strict=True):
    assert len(client.test[1]) == len(all_labels) // 5 > 0
    for k, everything in enumerate((all_images, all_labels)):
      np.testing.assert_array_equal(
          np.concatenate([client.train[k], client.test[k]]), everything
      )
    # Two of eight shards have three classes each at most; both parts have the
    # same ones, because they are cut from images in random order.
    assert set(client.test[1]) <= set(client.train[1])
    assert len(set(client.train[1])) <= 6 < images.num_classes


def _write_emnist(directory):
  """Three writers with 4, 3 and 2 training and 2, 0 and 1 test images.

  The first pixel of an image is its writer's number.
  """
  arrays = {'writer_ids': np.array(['a', 'b', 'c'])}
  for part, counts in (('train', (4, 3, 2)), ('test', (2, 0, 1))):
    writers = np.repeat(np.arange(3), counts)
    images = np.full((len(writers), 28, 28), 255, np.uint8)
    images[:, 0, 0] = 255 - writers
    arrays[f'{part}_images'] = images
    arrays[f'{part}_labels'] = np.arange(len(writers)) % 10
    arrays[f'{part}_writer'] = writers
  np.savez(directory / 'digits.npz', **arrays)


def test_writers_have_their_own_test_images(tmp_path):
  _write_emnist(tmp_path)
  settings = _settings(
      dataset='emnist', data_dir=str(tmp_path), standardize=False,
      num_clients=None,
  )
  assert settings.partition == 'writers'
  _, clients = personalization.divide(settings, 0)
  sizes = [(len(c.train[1]), len(c.test[1])) for c in clients]
  assert sizes == [(4, 2), (3, 0), (2, 1)]
  for number, client in enumerate(clients):
    for images, _ in client:
      np.testing.assert_allclose(images[:, 0] * 255, number, atol=1e-4)
  np.testing.assert_array_equal(clients[2].test[1], [2])


def test_mean_and_lowest_decile():
  values = list(np.linspace(0, 1, 11))
  assert personalization.client_accuracies(values, 'client') == pytest.approx(
      {'client_accuracy_mean': 0.5, 'client_accuracy_decile': 0.1}
  )


# The baseline and the evaluation, by hand.


def _descend(loss, start, rate, steps):
  for _ in range(steps):
    gradient = derivatives.gradient(loss, start)
    start = tf.nest.map_structure(
        lambda v, g: v - rate * g, start, gradient
    )
  return start


def _without_ridge(settings, seed):
  images, clients = personalization.divide(settings, seed)
  learning = personalization.make_problem(settings, images, personal=True)
  return learning, [client.train for client in clients][:2]


def test_fed_recon_reconstructs_heads_and_steps_on_the_backbone(in_process):
  settings = _settings(
      method=['personal', 'fedrecon'], ridge=0.0, batch_size=None,
      outer_local_steps=2, inner_learning_rate=0.2, outer_learning_rate=0.3,
  )
  learning, clients = _without_ridge(settings, 1)
  problem = learning.problem
  process = personalization.build_fed_recon(learning, settings, 1)
  state = process.next(
      process.initialize(), learning_problems.to_datasets(clients)
  ).state
  cost = fednest_tff.communication_cost(process)
  assert cost.rounds == 1

  ends = []
  x = problem.init_outer(1)
  for client in clients:
    inner, outer = problem.split(tf.nest.map_structure(tf.constant, client))
    head = _descend(
        lambda y, inner=inner: problem.inner_loss(
            x, y, problem.representation(x, inner)
        ),
        problem.init_inner(1), 0.2, 3,
    )
    ends.append(
        _descend(
            lambda at, outer=outer, head=head: problem.outer_loss(
                at, head, problem.representation(at, outer)
            ),
            x, 0.3, 2,
        )
    )
  expected = tf.nest.map_structure(lambda *parts: sum(parts) / 2, *ends)
  found = process.get_model_weights(state).trainable
  for one, other in zip(found, tf.nest.flatten(expected), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_clients_are_judged_with_the_shared_head_and_their_own():
  settings = _settings(batch_size=None, personalization_steps=4)
  trial = personalization.make_trial(settings, 0)
  images, clients = personalization.divide(settings, 0)
  learning = personalization.make_problem(settings, images)
  problem = learning.problem
  x, y = problem.init_outer(5), problem.init_inner(5)
  shared, own = [], []
  for client in clients:
    features = problem.representation(
        x, tf.nest.map_structure(tf.constant, client.train)
    )
    head = _descend(
        lambda at, features=features: problem.inner_loss(x, at, features),
        y, settings.inner_learning_rate, 4,
    )
    for found, layer in ((shared, y), (own, head)):
      weights = fednest_tff.NestedWeights(x, layer)
      scores = learning.predict(weights, client.test[0]).numpy()
      found.append(np.mean(scores.argmax(axis=1) == client.test[1]))
  found = trial.evaluate(fednest_tff.NestedWeights(x, y))
  assert list(found) == ACCURACIES
  assert found == pytest.approx({
      'client_accuracy_mean': np.mean(own),
      'client_accuracy_decile': np.quantile(own, 0.1),
      'shared_accuracy_mean': np.mean(shared),
      'shared_accuracy_decile': np.quantile(shared, 0.1),
  })
  assert np.mean(own) > np.mean(shared)


# The binary.


@pytest.mark.usefixtures('default_context')
def test_binary(tmp_path, capfd):
  methods = ['personal', 'lfednest', 'fedrecon']
  chosen = dict(
      method=methods, epochs=8, epochs_per_evaluation=4, compiled=False,
      clients_per_round=5, hidden=['30'],
  )
  assert _run(tmp_path, **chosen) == 0
  assert capfd.readouterr().err == ''
  summary = json.loads((tmp_path / 'summary.json').read_text())['methods']
  assert set(summary) == set(methods)
  rounds = {'personal': 1, 'lfednest': 2, 'fedrecon': 1}
  for method in methods:
    rows = simulation.read_rows(
        str(tmp_path / 'runs' / f'{method}-seed0' / 'metrics.csv')
    )
    assert [row['communication_rounds'] for row in rows] == [
        k * rounds[method] for k in range(1, 9)
    ]
    for name in ACCURACIES:
      values = [row[name] for row in rows if name in row]
      assert len(values) == 2
      assert all(0 <= value <= 1 for value in values)
      assert summary[method][name]['best'] == max(values)
      assert summary[method][name]['last'] == values[-1]
  assert (tmp_path / 'plot.png').stat().st_size > 5_000
  # Clients have two shards: with its own head one knows its few classes.
  for method in ('personal', 'fedrecon'):
    found = summary[method]
    accuracy = found['client_accuracy_mean']['last']
    assert accuracy > 0.9
    assert accuracy > found['shared_accuracy_mean']['last'] + 0.3


def test_stopped_run_goes_on(in_process, tmp_path):
  trial = personalization.make_trial(_settings(), 0)
  process = trial.build('personal')
  trial = trial._replace(build=lambda method: process)
  resuming.assert_goes_on(trial, 'personal', tmp_path)


@pytest.mark.usefixtures('default_context')
def test_another_binary_refuses_the_method(tmp_path, capfd):
  from experiments import hyper_representation

  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(output_dir=str(tmp_path), method=['personal']):
    code = program.main(hyper_representation.EXPERIMENT, ['x'])
  assert code == 2
  (line,) = capfd.readouterr().err.splitlines()
  assert 'is for problems from fednest_tff.personal' in line
