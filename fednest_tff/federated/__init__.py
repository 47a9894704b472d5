"""Federated machinery: what every method is made of, whatever it computes."""
