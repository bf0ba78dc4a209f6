"""``python -m autopar.cli``: the command where there is no installation."""

from autopar.cli import main

main()
