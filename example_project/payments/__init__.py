"""The app that opens accounts at a bank, and releases fundings to them one by one."""
