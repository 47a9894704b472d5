"""Settings of experiments, from defaults and flags."""


import pytest

from experiments import minimax, settings


def test_resolve():
  found = settings.resolve('x', {'ridge': 0.1, 'epochs': 7}, {'seed': 3})
  assert vars(found) == settings.COMMON | dict(ridge=0.1, epochs=7, seed=3)
  assert settings.resolve('x', {'ridge': 0.1}, {'ridge': 0.2}).ridge == 0.2


@pytest.mark.parametrize(
    'given, message',
    [
        (dict(hidden=['3']), '--hidden has no effect in x'),
        (dict(clients_per_round=9), '--clients_per_round=9 is more than'),
        (dict(ridge=float('nan')), '--ridge=nan must be finite'),
    ],
)
def test_resolve_refuses(given, message):
  defaults = dict(
      num_clients=8, clients_per_round=None, inner_learning_rate=1.0, ridge=0.1
  )
  with pytest.raises(settings.SettingsError, match=message):
    settings.resolve('x', defaults, given)


def test_variants_have_their_own_flags():
  resolve = minimax.EXPERIMENT.resolve
  assert 'dataset' not in vars(resolve({}))
  robust = vars(resolve({'problem': 'robust_regression'}))
  assert 'dataset' in robust and 'dimension' not in robust
  with pytest.raises(settings.SettingsError, match='robust_regression: leave'):
    resolve({'problem': 'robust_regression', 'dimension': 3})
  # All of them are offered on the command line.
  assert minimax.EXPERIMENT.flags().keys() > {'dataset', 'dimension', 'epochs'}
