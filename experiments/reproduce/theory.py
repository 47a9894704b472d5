"""The paper's theory, measured on quadratics that are known in closed form.

Three measurements with the library's own processes, in the runtime of the
caller: the bias of FedIHGP (Lemma 2.2), the gradient over K epochs (Corollaries
3.1-3.3, Theorem 3.2), and FedInn against FedAvg on the inner problem.
"""

from collections.abc import Callable, Sequence
import math

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from experiments.reproduce import quadratics, theory_report
from experiments.reproduce.quadratics import KINDS, Quadratics
from experiments.reproduce.verdicts import Record
from experiments.settings import Flags
import fednest_tff

draw, claims = theory_report.draw, theory_report.claims

TERMS = (1, 2, 4, 8, 16, 32, 64)
EXACT_TERMS = tuple(2**k for k in range(13))  # No rounds: closed form.
# An epoch's number is this times log2(K), plus k: a schedule reads K off it,
# one compiled process serves all K, and no two of them share a draw.
_STRIDE = 2**16
_LANES = 4  # Seeds of `gradient_slopes` for one of the caller's.
_SHORT = 128  # Runs shorter than this are repeated to this many epochs.
# Squared distances below are rounding.
_ROUNDING = 1e-26


def _iterates(
    process: fednest_tff.NestedProcess,
    datasets: list[tf.data.Dataset],
    steps: int,
) -> np.ndarray:
  """p after each round of one call of FedIHGP, none of them left out.

  The stochastic product would stop at its N'; here it goes on, so that all
  values that p may take are seen.
  """
  state, found = process.initialize(), []
  for _ in range(steps):
    state = process.next(state, datasets).state
    own = state.method
    solver = own.solver._replace(products_left=np.int32(1))
    state = state._replace(method=own._replace(solver=solver))
    found.append(solver.p[0])
  return np.array(found)


def _draws(
    process: fednest_tff.NestedProcess,
    datasets: list[tf.data.Dataset],
    count: int,
) -> np.ndarray:
  """p of `count` calls of FedIHGP, with an N' and samples of their own."""
  state, found = process.initialize(), []
  for _ in range(count):
    state = process.next(state, datasets).state
    while state.method.solver.products_left > 0:
      state = process.next(state, datasets).state
    found.append(state.method.solver.p[0])
    state = fednest_tff.move_ihgp(state, state.outer, state.inner)
  return np.array(found)


def ihgp_bias(
    case: Quadratics | None = None,
    terms: tuple[int, ...] = TERMS,
    sampled_terms: tuple[int, ...] = (1, 2, 4),
    num_draws: int = 200,
    exact_terms: tuple[int, ...] = EXACT_TERMS,
) -> Record:
  """How far p of FedIHGP is from H^-1 grad_y f, over N.

  With full batches the only randomness of 'stochastic' is N', so its mean and
  its variance are exact sums over N'. 'truncated' and 'cg' have no randomness.
  'sampled' is the plain mean of many calls in which every gradient and every
  Hessian is that of a single example: its error is the bias plus a sampling
  error, whose root mean square is `error`; `means` are those means, with the
  squares of the standard errors of their entries. 'exact' is the variance of
  'stochastic' computed, not measured, and so for larger N.

  Args:
    case: The clients.
    terms: Values of N.
    sampled_terms: Those for 'sampled'.
    num_draws: Calls for 'sampled'.
    exact_terms: Values of N for 'exact'.

  Returns:
    For each N the biases, Lemma 2.2's bound on them, (1/mu_g) (1 - 1/kappa_g)^N
    |grad_y f|, the mean of |p - p*| with its bound 2 |grad_y f| / mu_g, and the
    variance of p with the bound 6 l_f0^2 / mu_g^2. That one is the paper's
    sigma~_f^2 for exact samples and the Jacobian -I of this problem, where l_f0
    = max_i |grad_y f_i| at this point; as printed, with l_g1 in place of |-I|,
    it is `printed_variance_bound`.
  """
  case = case or quadratics.bias_case()
  problem, datasets = case.problem('bilevel'), case.datasets()
  A, _, c = case.means
  exact = quadratics.solve(A, -c)[0]  # y = 0 at the start; one lane.
  norm = float(np.linalg.norm(c))
  most = max(terms)

  def build(kind, terms=most, sample=None):
    return fednest_tff.build_fed_ihgp(
        problem,
        solver=fednest_tff.FederatedInverseHessian(
            kind, terms, case.smoothness
        ),
        gradients=fednest_tff.GlobalGradients(sample),
    )

  results: Record = {
      'N': list(terms),
      'condition': case.condition,
      'rate': 1 - 1 / case.condition,
      'bound': [
          (1 - 1 / case.condition) ** N / case.mu * norm for N in terms
      ],
      'error_bound': 2 * norm / case.mu,
      'variance_bound': 6 * (case.lipschitz / case.mu) ** 2,
      'printed_variance_bound': (
          6 * (case.lipschitz * case.joint_smoothness / case.mu) ** 2
      ),
      'exact': {
          'N': list(exact_terms),
          'variance': [quadratics.ihgp_variance(case, N) for N in exact_terms],
      },
  }
  for ihgp in ('truncated', 'cg'):
    found = _iterates(build(ihgp), datasets, most)
    results[ihgp] = [
        float(np.linalg.norm(found[N - 1] - exact)) for N in terms
    ]
  # p_0 has the factor N / l; what follows is linear in it.
  chain = _iterates(build('stochastic'), datasets, most) / most
  results |= {'stochastic': [], 'mean_error': [], 'variance': []}
  for N in terms:
    values = N * chain[:N]  # for N' = 0, ..., N - 1, each as likely
    mean = values.mean(axis=0)
    results['stochastic'].append(float(np.linalg.norm(mean - exact)))
    errors = np.linalg.norm(values - exact, axis=1)
    results['mean_error'].append(float(errors.mean()))
    results['variance'].append(float(((values - mean) ** 2).sum(1).mean()))
  sampled: Record = {
      'N': list(sampled_terms), 'means': [], 'bias': [], 'error': []
  }
  for N in sampled_terms:
    values = _draws(
        build('stochastic', N, sample=1), datasets, num_draws
    )
    mean, squares = values.mean(axis=0), values.var(axis=0, ddof=1) / num_draws
    sampled['means'].append(dict(p=mean.tolist(), squares=squares.tolist()))
    sampled['bias'].append(float(np.linalg.norm(mean - exact)))
    sampled['error'].append(math.sqrt(squares.sum()))
  return results | {'sampled': sampled, 'num_draws': num_draws}


def slope(epochs: Sequence[int], values: npt.ArrayLike) -> float:
  """The slope of a line through the logarithms."""
  return float(np.polyfit(np.log(epochs), np.log(values), 1)[0])


def _mean_and_error(values: list[float]) -> tuple[float, float]:
  """The mean over seeds and its standard error (0 for one seed)."""
  count = len(values)
  error = 0.0
  if count > 1:
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
  return float(np.mean(values)), error


def build_slopes_process(
    case: Quadratics, kind: str, most_epochs: int
) -> tuple[fednest_tff.NestedProcess, int]:
  """FedNest with the step sizes of Theorem 3.1, for every K at once.

  alpha = 0.6 / sqrt(K) and beta = 4 alpha / T, each divided by tau_i = 2, with
  samples of one example everywhere. T = 2 (bilevel, minimax) or 1, constant
  as the corollaries have it, and N the least with b = kappa_g l_f0 (1 -
  1/kappa_g)^N <= K^-1/4 for the largest K, so for all of them. (The paper
  prints l_f1 in b; what bounds |grad_y f_i| is l_f0.)

  Args:
    case: The clients.
    kind: Of the problem.
    most_epochs: The largest K.

  Returns:
    The process and N.
  """
  def alpha(epoch):
    return 0.6 * 2.0 ** (-tf.cast(epoch // _STRIDE, tf.float64) / 2)

  rounds = 2 if kind in ('bilevel', 'minimax') else 1
  terms = math.ceil(
      math.log(case.condition * case.lipschitz * most_epochs**0.25)
      / -math.log(1 - 1 / case.condition)
  )
  options: Flags = {}
  if kind != 'single_level':
    options = dict(
        inner_learning_rate=lambda epoch: 4 * alpha(epoch) / rounds,
        inner_rounds=rounds,
        inner_local_steps=2,
    )
  process = fednest_tff.build(
      case.problem(kind),
      outer_learning_rate=alpha,
      outer_local_steps=2,
      divide_by_local_steps=True,
      batch_size=1,
      gradient_batch_size=1,
      neumann_terms=terms,
      smoothness=case.smoothness,
      **options,
  )
  return process, terms


def _squared_gradients(process, case, kind, datasets, exponent):
  """|grad f(x_k)|^2 for k < K = 2^exponent, a row per k, a column per lane.

  Short runs are repeated with other draws, as the mean over lanes leaves the
  noise of N', which lanes have in common; rows are means over repetitions.
  """
  found = []
  for repetition in range(max(1, _SHORT >> exponent)):
    state = process.initialize()
    state = state._replace(
        epoch=np.int32(exponent * _STRIDE), seed=np.array([repetition, 0])
    )
    path = []
    for _ in range(2**exponent):
      path.append(np.sum(case.gradient(kind, state.outer) ** 2, axis=-1))
      state = process.next(state, datasets).state
    found.append(path)
  return np.mean(found, axis=0)


def gradient_slopes(
    exponents: tuple[int, ...] = tuple(range(4, 11)),
    seeds: int = 12,
    kinds: tuple[str, ...] = KINDS,
) -> Record:
  """The mean over k < K of |grad f(x_k)|^2, against K.

  The theory's bound has two terms of order 1/sqrt(K): (f(x_0) - f*) / (alpha
  K), the way to the solution, and alpha sigma^2, the noise around it. Here each
  is a good part of the mean; `late`, the mean over the second half of the
  epochs, is the noise alone once the way is over.

  Args:
    exponents: K = 2^e for these e.
    seeds: Clients and noise are drawn as often, each seed a lane of one run.
      Lanes share the numbers of the examples drawn and the bilevel N', so their
      standard error is too small: by 2.4 for bilevel (0.02 against 0.05 between
      four runs up to K = 256), 1.4 for compositional, not for single level.
    kinds: Of problems.

  Returns:
    K, and for each kind the means, one list per seed, the slope of a line
    through their logarithms and its standard error over seeds; `late` likewise.
  """
  case = quadratics.slopes_case(seeds)
  datasets = case.datasets()
  epochs = [2**e for e in exponents]
  results: Record = {'K': epochs, 'condition': case.condition, 'kinds': {}}
  for kind in kinds:
    process, terms = build_slopes_process(case, kind, epochs[-1])
    paths = [
        _squared_gradients(process, case, kind, datasets, e) for e in exponents
    ]
    fitted = {}
    for name, part in (('means', 0), ('late', 0.5)):
      values = np.transpose(
          [path[int(part * len(path)) :].mean(axis=0) for path in paths]
      )
      value, error = _mean_and_error([slope(epochs, v) for v in values])
      fitted[name] = dict(values=values.tolist(), slope=value, error=error)
    results['kinds'][kind] = fitted
    if kind == 'bilevel':
      results['neumann_terms'] = terms
  return results


def inner_convergence(
    calls: int = 60,
    beta: float = 0.1,
    steps: int = 5,
    case: Quadratics | None = None,
) -> Record:
  """|y - y*|^2 of FedInn and of LFedInn, which is FedAvg on g, at a fixed x.

  Gradients are exact, so client drift is all that is left.

  Args:
    calls: Of each.
    beta: The step size.
    steps: tau_i.
    case: The clients.

  Returns:
    The squared distances before and after each call, and the rounds that a call
    takes; FedInn's rate per call, fitted and predicted; LFedInn's floor,
    measured and predicted.
  """
  case = case or quadratics.inner_case()
  problem, datasets = case.problem('bilevel'), case.datasets()
  results: Record = {
      'steps': steps, 'rounds_per_call': {'fed_inn': 2, 'lfed_inn': 1}
  }
  builders: dict[str, Callable[..., fednest_tff.NestedProcess]] = {
      'fed_inn': fednest_tff.build_fed_inn,
      'lfed_inn': fednest_tff.build_lfed_inn,
  }
  for name, build in builders.items():
    process = build(problem, inner=fednest_tff.LocalWork(beta, steps))
    state = process.initialize()
    x, found = np.asarray(state.outer), []
    solution = case.inner_solution(x)
    for _ in range(calls + 1):
      found.append(float(np.sum((state.inner - solution) ** 2)))
      state = process.next(state, datasets).state
    results[name] = found
  squares = np.array(results['fed_inn'])
  # The first calls shrink the fast directions, the last ones are rounding.
  used = np.flatnonzero(squares > _ROUNDING)
  used = used[len(used) // 2 :]
  rate = math.exp(np.polyfit(used, np.log(squares[used]), 1)[0])
  floor = quadratics.fixed_point(case, beta, steps, x) - solution
  return results | {
      'rate': rate,
      'predicted_rate': quadratics.inner_rate(case, beta, steps),
      'floor': results['lfed_inn'][-1],
      'predicted_floor': float(np.sum(floor**2)),
  }


def run(preset: str, seeds: int) -> Record:
  """All measurements.

  Args:
    preset: 'quick', or 'paper' or 'tuned', which are the same here.
    seeds: A fourth of those of `gradient_slopes`, where they cost nothing.

  Returns:
    A dictionary of plain numbers.
  """
  quick = preset == 'quick'
  return {
      'preset': preset,
      'bias': ihgp_bias(
          sampled_terms=(2,) if quick else (1, 2, 4),
          num_draws=50 if quick else 300,
      ),
      'slopes': gradient_slopes(
          tuple(range(4, 9 if quick else 11)), _LANES * seeds
      ),
      'inner': inner_convergence(),
  }
