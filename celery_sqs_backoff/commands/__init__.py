"""Command line programs: thin shells over engines that do not print."""
