"""Find out whether the tests fail when the package has a mistake.

``python -m tests.mutants worker`` makes mistakes in the modules of a room, one at a time, and runs
the tests that reach the changed line. A room is a subpackage, such as ``worker``.
"""
