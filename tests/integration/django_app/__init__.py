"""A Django project of the fewest settings, for tests of what is Django's."""
