"""A Django project with the fewest settings, for tests that need Django."""
