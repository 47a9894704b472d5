"""Programs that run the library; `python -m experiments.NAME --help`."""
