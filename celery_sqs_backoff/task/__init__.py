"""The code of the process that runs a task, and its report to the worker's main process."""
