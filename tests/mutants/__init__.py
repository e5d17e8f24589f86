"""A yardstick for the tests: do they fail when the package is wrong?

``python -m tests.mutants worker`` plants mistakes into the modules of a room, one at a time, and
runs the tests that reach the changed line.
"""
