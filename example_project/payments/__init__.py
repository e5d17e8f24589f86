"""The Django app that opens an account at a bank, and lets the bank release fundings to it."""
