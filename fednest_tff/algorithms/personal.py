"""Personal: each client has its own inner solution, one round per epoch.

The problem is min_x mean_i f_i(x, y_i*(x)) with y_i*(x) = argmin_y g_i(x, y).
One epoch, with y_0 where all clients start and x_i = x:

  clients   tau_i times:
              y_i <- y_i - beta grad_y g_i(x_i, y_i), some times from y_0
              p_i, which solves grad^2_y g_i(x_i, y_i) p = grad_y f_i(x_i, y_i)
              x_i <- x_i - alpha (grad_x f_i - grad^2_xy g_i p_i)(x_i, y_i)
  server    x <- mean_i x_i

The objective is a mean of functions that each belong to one client, so a
client's own Hessian gives its part of the hypergradient exactly, up to the
errors of y_i and p_i; in LFedOut, where clients share y, it does not. With
tau_i = 1 an epoch is a step along the mean hypergradient; with more steps
clients drift, as in FedAvg.

Clients keep nothing between rounds, neither y_i nor p_i, and never send them.
y_0 stays where it was: it is part of the model, and `build_personalize` takes
the same inner steps from it for a client that wants its y_i. Since x_i moves in
the local steps, features cannot be kept from one local step to the next; they
are kept within the inner steps at one x_i.

Two relatives. Without the indirect part, p_i = 0, this is Federated
Reconstruction (K. Singhal et al., NeurIPS 2021; TFF's `build_fed_recon`) that
reconstructs y_i in every step. With g_i(x, y) = L_i(y) + lambda/2 ||y - x||^2
and f_i of y alone it is implicit MAML (A. Rajeswaran, C. Finn, S. Kakade,
S. Levine, NeurIPS 2019), there with inner steps from x.
"""

from collections.abc import Callable

import tensorflow as tf

from fednest_tff import options, vector_space
from fednest_tff.algorithms import fed_ihgp, one_round
from fednest_tff.algorithms.one_round import OneRoundMessage
from fednest_tff.federated import method, process, server
from fednest_tff.federated.aggregation import Factory
from fednest_tff.federated.rounds import Answer, Executor, Round
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import descent, personal_steps
from fednest_tff.local.client import Client
from fednest_tff.local.descent import LocalWork
from fednest_tff.local.inverse_hessian import InverseHessian
from fednest_tff.local.sampling import Purpose
from fednest_tff.problems import Batch, Problem
from fednest_tff.vector_space import Structure


class Personal(server.OuterStepMethod):
  """The method; see `build_personal`."""

  def __init__(
      self,
      types: ProblemTypes,
      inner: LocalWork,
      outer: LocalWork,
      solver: InverseHessian,
      aggregator: Factory | None,
      optimizer: server.Optimizer | None,
  ):
    problem = types.problem
    inner, outer = inner.at_level('inner'), outer.at_level('outer')
    chosen = fed_ihgp.solver_for(problem, solver)
    hparams = one_round.build_hparams(problem, inner, outer, chosen, solver)
    inner, outer = inner.without_rate(), outer.without_rate()

    @types.computation(one_round.message_type(types, chosen), types.client)
    def client_update(message: OneRoundMessage, client: Client) -> Answer:
      x, start, beta, alpha, smoothness, seed = message
      x_i, y_i = personal_steps.personal_steps(
          problem, chosen, x, start, client, inner, outer, beta, alpha,
          smoothness, client_lib.seed_of(client, seed, Purpose.CLIENT_STEPS),
      )
      change, metrics = descent.change(x_i, x, problem.scalar_dtype)
      features = client_lib.features_at(problem, x, client)
      distance = vector_space.norm(vector_space.subtract(y_i, start))
      metrics['outer_loss'] = problem.outer_loss(x, y_i, features.outer)
      metrics['inner_loss'] = problem.inner_loss(x, y_i, features.inner)
      metrics['inner_distance'] = tf.cast(distance, problem.scalar_dtype)
      return change, metrics

    self._update = Round(
        'personal_update', types, client_update, 'outer_aggregator', aggregator
    )
    step = server.ServerStep(types, 'outer', 'Personal: x+', optimizer)
    super().__init__(types, [self._update], hparams, step)

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    x, start, optimizer = variables
    changes = do.round(self._update, one_round.build_message(variables, plan))
    do.measure(**{
        name: changes.metrics[name]
        for name in ('outer_loss', 'inner_loss', 'inner_distance')
    })
    optimizer, x = self.outer_step(do, optimizer, x, changes)
    return method.Variables(x, start, optimizer)


def build_personal(
    problem: Problem,
    *,
    inner: LocalWork = LocalWork(),
    outer: LocalWork = LocalWork(),
    solver: InverseHessian = InverseHessian(),
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """Personal: each client solves its own inner problem and steps on x.

  Its only round is 'personal_update'. Metrics: `outer_loss` and `inner_loss`
  are the means of f_i(x, y_i) and g_i(x, y_i) at the x before the epoch, with
  y_i as personalised there; `inner_distance` is the mean of ||y_i - y_0||.

  Args:
    problem: From `fednest_tff.personal`.
    inner: beta, and the steps and minibatches of y_i at one x_i.
    outer: alpha, tau_i and the minibatches of the outer steps, of the Hessian
      products, too.
    solver: How each client solves for p_i with its own Hessian. l, and 1/beta
      likewise, must bound the largest eigenvalue of every client's Hessian, not
      only of their mean; conjugate gradient needs no l.
    outer_aggregator: A `tff.aggregators` factory for x+ - x in place of the
      plain mean.
    outer_optimizer: The server's for x; `None` to add the mean change.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`; `inner` of its state is y_0 and stays.
  """
  types = ProblemTypes(problem, client_weighting, inner_is_personal=True)
  personal = Personal(
      types, inner, outer, solver, outer_aggregator, outer_optimizer
  )
  return process.build_process(personal, seed)


def build_personalize(
    problem: Problem, *, inner: LocalWork
) -> Callable[[process.NestedWeights, Structure, tf.Tensor], Structure]:
  """How a client gets its y_i: by the inner steps of `build_personal`.

  Args:
    problem: A problem with an inner variable. If clients share its solution,
      this fits the shared y to one client.
    inner: beta, a number, and the steps and minibatches.

  Returns:
    A `tf.function` `(weights, examples, seed) -> y_i`, traced once. It takes x
    and the y to start from, as `get_model_weights` returns them; a client's
    examples, a structure of arrays with one leading axis, and uses all of them;
    and an int64 seed of shape [2] for the minibatches.
  """
  method.check_has_inner(problem)
  work = inner.at_level('inner')
  beta = options.check_positive('inner_learning_rate', work.learning_rate)

  @tf.function(
      autograph=False,
      input_signature=[
          process.NestedWeights(problem.outer_spec, problem.inner_spec),
          tf.nest.map_structure(
              lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
              problem.element_spec,
          ),
          tf.TensorSpec([2], tf.int64),
      ]
  )
  def personalize(
      weights: process.NestedWeights, examples: Batch, seed: tf.Tensor
  ) -> Structure:
    return personal_steps.personalize(
        problem,
        weights.outer,
        weights.inner,
        examples,
        work,
        tf.constant(beta, problem.scalar_dtype),
        seed,
    )

  return personalize
