"""The oracle, error budgets and conformance runner, for tests of backends inside and outside
this package.
"""
