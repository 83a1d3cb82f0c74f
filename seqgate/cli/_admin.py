"""`seqgate admin`: work on a whole installation."""

from seqgate.cli._command import command, group
from seqgate.cli._jobs import copy

app = group("Move an installation.")

command(app, "copy")(copy)
