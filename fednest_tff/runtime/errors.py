"""What can go wrong with processes that a runtime needs."""


class WorkerError(RuntimeError):
  """A worker or a cluster did not start, or was lost while it was needed.

  The message is one line.
  """
