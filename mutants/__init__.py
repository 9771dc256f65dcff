"""Mistakes that the tests must notice: each is made in a copy of the package, one at a time (`python -m mutants`)."""
