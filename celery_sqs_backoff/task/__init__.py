"""The process that runs a task: the base class, and what it hands to the worker's main process."""
