"""Tests that know the worker's inside: arithmetic, parsers, and guards against bugs upstream.

They call private functions with values that no queue would bring in a reasonable time. When the
worker is written anew they change with it, or go. All other tests of the worker use the rig.
"""
