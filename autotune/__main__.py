"""`python -m autotune`: the command line, where the script `autotune` is not on the PATH."""

from autotune.cli import app

app(prog_name="autotune")
