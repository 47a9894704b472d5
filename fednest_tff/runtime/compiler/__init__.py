"""Turns a TFF computation into one TensorFlow function.

The steps, in the order in which a computation passes through them:

- `call_dominant`: rewrites it as a list of calls, and identifies it by a hash.
- `datasets`: gives clients copies of datasets, if they share a shuffle.
- `readings`: finds the calls that only read clients' datasets, and runs them.
- `cohort`: decides how values at clients are held: `unrolled`, written out one
  after the other, or `batched`, at once or in loops `side_by_side`.
  `broadcast`: what all share; `rows`: what each has.
- `placed`: gives arguments and results the form of flat lists of tensors.
- `repeats`: finds rounds that are repeated, by their `steps`; each becomes one
  of the `loops`. `invariants` are computed before a loop.
- `lowering`: traces all calls into one function (`build_function`), or runs
  them one after the other (`evaluate_computation`).
- `intrinsics`: the calls of TFF's own operators, such as `federated_sum`.
- `sequences`: those of them that take datasets.
- `reductions`: sums of stacked values.
- `secure_sums`: simulates TFF's secure sums.
- `graphs`: the calls of `tff.tensorflow.computation`s. `graph_rewriting`
  simplifies their graphs, `converters` vectorises their operations and
  `while_loops` the loops in them.
- `call_options`: how TensorFlow optimizes the function.
- `values`: converts single Python values to tensors and back.
"""
