"""Runs computations on the machines of a Ray cluster."""
