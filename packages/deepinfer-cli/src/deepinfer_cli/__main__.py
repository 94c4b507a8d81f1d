"""Entry for ``python -m deepinfer_cli``."""

from __future__ import annotations

import sys

from deepinfer_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
