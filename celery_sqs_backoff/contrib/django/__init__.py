"""The Django app, with the tables of the store ``"django://"`` and of the outbox."""
