"""Federated algorithms: TFF processes around the local mathematics."""
