"""Code that runs in a task's process, and the report to the worker's main process."""
