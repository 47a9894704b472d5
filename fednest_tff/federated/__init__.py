"""Parts that all methods are made of: types, means, rounds and processes."""
