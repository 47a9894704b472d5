"""Everything random comes from the seed and the epoch in the state."""

import asyncio

import numpy as np
import pytest
import tensorflow_federated as tff

import fednest_tff
from tests.helpers import quadratic
from tests.helpers.processes import assert_equal, build_flat

EPOCHS = 3
CLIENTS = quadratic.make_clients(num_clients=4, examples=(2, 3, 4, 5))
COHORT = quadratic.to_datasets(CLIENTS)


def _build(adam=0.1, **changes):
  """A process that draws all that can be drawn."""
  options = dict(
      inner_learning_rate=0.1,
      outer_learning_rate=0.1,
      inner_local_steps=2,
      outer_local_steps=2,
      batch_size=1,
      neumann_terms=2,
      participation=0.6,
      gradient_batch_size=1,
      outer_optimizer=tff.learning.optimizers.build_adam(adam),
      seed=0,
  )
  problem = quadratic.build_problem(split=0.5)
  return fednest_tff.build(problem, **(options | changes))


def _select(round_number):
  """Two of the four clients, as a function of the round number alone."""
  first = round_number % len(COHORT)
  return [COHORT[first], COHORT[first - 1]]


def _run(process, epochs, state=None):
  state = process.initialize() if state is None else state
  outputs = []
  for _ in range(epochs):
    outputs.append(process.next(state, COHORT))
    state = outputs[-1].state
  return outputs


def _differ(one, other):
  return all(
      np.any(getattr(one, name) != getattr(other, name))
      for name in ('outer', 'inner')
  )


@pytest.fixture(scope='module')
def process():
  return _build()


@pytest.fixture(scope='module')
def outputs(process):
  return _run(process, EPOCHS)


def test_same_seed_gives_the_same_bits(outputs):
  for output, other in zip(outputs, _run(_build(), EPOCHS), strict=True):
    assert_equal(output.state, other.state)
    assert_equal(output.metrics, other.metrics)


# ---- Hyper-parameters -------------------------------------------------------


def test_hyper_parameters_of_the_state(process):
  state = process.initialize()
  hparams = process.get_hparams(state)
  adam = hparams.pop('outer_optimizer')
  # In the state, no l is 0: it is 1 / beta.
  assert hparams == dict(
      inner_learning_rate=0.1, outer_learning_rate=0.1, smoothness=0.0
  )
  assert adam['learning_rate'] == np.float32(0.1)
  same = process.set_hparams(state, process.get_hparams(state))
  assert_equal(same, state)


def test_other_numbers_compile_nothing_and_give_the_same_bits(
    process, outputs, in_process_context
):
  state = process.initialize()
  hparams = process.get_hparams(state)
  hparams |= dict(
      inner_learning_rate=0.05, outer_learning_rate=0.3, smoothness=2.5
  )
  hparams['outer_optimizer']['learning_rate'] = 0.02
  changed = process.set_hparams(state, hparams)
  compiled = in_process_context.runtime.num_functions
  found = _run(process, EPOCHS, changed)
  assert in_process_context.runtime.num_functions == compiled
  assert _differ(found[0].state, outputs[0].state)

  other = _build(
      0.02, inner_learning_rate=0.05, outer_learning_rate=0.3, smoothness=2.5
  )
  for output, expected in zip(found, _run(other, EPOCHS), strict=True):
    assert_equal(output.state, expected.state)
    assert_equal(output.metrics, expected.metrics)


def test_weights_can_be_set(process):
  state = process.initialize()
  x, y = np.arange(quadratic.DX), np.arange(quadratic.DY)
  weights = fednest_tff.NestedWeights(x * 1.5, y * 2.5)
  changed = process.set_model_weights(state, weights)
  assert_equal(process.get_model_weights(changed), weights)
  assert_equal(
      changed._replace(outer=state.outer, inner=state.inner), state
  )


# ---- Seeds ------------------------------------------------------------------


def test_order_of_the_clients_does_not_matter(process, outputs):
  output = process.next(process.initialize(), COHORT[::-1])
  for name in ('outer', 'inner'):
    np.testing.assert_allclose(
        getattr(output.state, name), getattr(outputs[0].state, name),
        rtol=1e-10,
    )  # fmt: skip


def test_other_seed_has_another_initial_point(process):
  start = process.initialize()
  other = build_flat(
      fednest_tff.build_lfed_inn, quadratic.build_problem(),
      inner_learning_rate=0.1, seed=1,
  ).initialize()  # fmt: skip
  assert _differ(start, other)
  np.testing.assert_array_equal(start.seed, [0, 0])
  np.testing.assert_array_equal(other.seed, [1, 0])


def test_seed_lives_in_the_state(process, outputs):
  start = process.initialize()
  other = start._replace(seed=np.array([1, 0]))
  output = process.next(other, COHORT)
  assert _differ(output.state, outputs[0].state)
  np.testing.assert_array_equal(output.state.seed, [1, 0])
  # And back: nothing of it is left in the process.
  assert_equal(process.next(start, COHORT).state, outputs[0].state)


def test_every_epoch_has_its_own_draws(process, outputs):
  start = process.initialize()
  later = process.next(start._replace(epoch=np.int32(1)), COHORT)
  assert later.state.epoch == 2
  assert _differ(later.state, outputs[0].state)


def test_every_inner_call_has_its_own_draws():
  # Two calls with one seed would draw the same example twice.
  process = fednest_tff.build(
      quadratic.build_problem(), 'lfednest', inner_learning_rate=0.2,
      outer_learning_rate=0.1, inner_rounds=2, inner_local_steps=1,
      batch_size=1, neumann_terms=1,
  )  # fmt: skip
  client = CLIENTS[3]
  form = [
      quadratic.local_form({k: v[i : i + 1] for k, v in client.items()})
      for i in range(5)
  ]
  state, pairs = process.initialize(), []
  for epoch in range(4):
    start = state._replace(epoch=np.int32(epoch))
    end = process.next(start, COHORT[3:]).state.inner
    x, y = start.outer, start.inner
    for i, j in np.ndindex(5, 5):
      v = y - 0.2 * form[i].inner_gradient(x, y)
      v = v - 0.2 * form[j].inner_gradient(x, v)
      if np.allclose(end, v, rtol=1e-10, atol=1e-10):
        pairs.append((i, j))
  assert len(pairs) == 4
  assert any(i != j for i, j in pairs)
  assert len(set(pairs)) > 2


def test_random_stop_depends_on_seed_and_epoch():
  """N', read off FedIHGP's state after its first round at each point."""
  process = build_flat(
      fednest_tff.build_fed_ihgp, quadratic.build_problem(), smoothness=3.0,
      neumann_terms=5,
  )  # fmt: skip

  def stops(seed):
    state, stops = process.initialize()._replace(seed=np.array(seed)), []
    for _ in range(8):
      first = process.next(state, COHORT[:1]).state
      stops.append(int(first.method.solver.products_left))
      state = fednest_tff.move_ihgp(first, first.outer, first.inner)
      assert state.method.step == 0
    return stops

  assert len(set(stops([0, 0]))) > 2
  assert stops([0, 0]) != stops([1, 0])


def test_saved_state_goes_on_as_if_never_saved(process, outputs, tmp_path):
  async def save_and_load():
    manager = tff.program.FileProgramStateManager(tmp_path)
    await manager.save(outputs[1].state, 1)
    return await manager.load(1, process.initialize())

  restored = asyncio.run(save_and_load())
  assert isinstance(restored, fednest_tff.NestedState)
  assert_equal(restored, outputs[1].state)
  output = process.next(restored, COHORT)
  assert_equal(output.state, outputs[2].state)
  assert_equal(output.metrics, outputs[2].metrics)


@pytest.fixture
def event_loop():
  """TFF's training loop takes the thread's own, which asyncio.run removes."""
  loop = asyncio.new_event_loop()
  asyncio.set_event_loop(loop)
  yield loop
  asyncio.set_event_loop(None)
  loop.close()


@pytest.mark.usefixtures('event_loop')
def test_training_loop_resumes_to_the_same_end(process, tmp_path):
  def train(directory, rounds):
    return tff.simulation.run_training_process(
        process,
        _select,
        total_rounds=rounds,
        program_state_manager=tff.program.FileProgramStateManager(
            tmp_path / directory
        ),
    )

  whole = train('whole', EPOCHS)
  assert train('parts', 1).epoch == 1
  resumed = train('parts', EPOCHS)
  assert resumed.epoch == EPOCHS
  assert_equal(resumed, whole)
  # The selection was used: round 1 has clients 1 and 0.
  state = process.initialize()
  for round_number in range(1, EPOCHS + 1):
    state = process.next(state, _select(round_number)).state
  assert_equal(state, whole)
