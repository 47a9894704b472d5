"""Federated algorithms, one per module, each with builders of TFF processes."""
