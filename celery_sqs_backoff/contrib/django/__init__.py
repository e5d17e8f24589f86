"""The Django app, with the tables of the store ``"django"`` and the outbox."""
