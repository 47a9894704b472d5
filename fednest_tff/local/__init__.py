"""Local mathematics: what one client, or the server, computes on its own.

Pure TensorFlow, no TFF: every function here can be called eagerly, traced into
a `tf.function` or wrapped by `tff.tensorflow.computation`.
"""
