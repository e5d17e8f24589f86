"""Command line programs. They parse options and print, and call engines that do not print."""
