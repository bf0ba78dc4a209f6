"""Imported last by the server that ranks are forked from: none of them looks at, or copies, what it has imported."""

from tests.garbage import freeze

freeze()
