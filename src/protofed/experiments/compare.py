"""Several methods under equal conditions: same partition, same initial weights, same client draws, per seed."""


class Comparison: ...


def compare(): ...
