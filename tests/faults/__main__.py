"""`python -m tests.faults`: write the table of faults from the tests."""

from __future__ import annotations

import sys

from .table import PAGE, page, rows

try:
    PAGE.write_text(page(rows()), "utf-8")
except ValueError as error:
    sys.exit(f"error: {error}")
