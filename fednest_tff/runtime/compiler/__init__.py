"""Turns a TFF computation into one TensorFlow function.

The steps, in the order in which a computation passes through them:

- `call_dominant`: rewrites it as a list of calls, and identifies it by a hash.
- `cohort`: decides how values at clients are held, written out or in a loop.
- `placed`: gives arguments and results the form of flat lists of tensors.
- `lowering`: traces all calls into one function (`build_function`).
- `intrinsics`: the calls of TFF's own operators, such as `federated_sum`.
- `graphs`: the calls of `tff.tensorflow.computation`s.
- `values`: converts single Python values to tensors and back.
"""
