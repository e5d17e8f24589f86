"""The Django app: the table of the store ``"django"``."""
