"""Keep the distributions in step: exact pins on siblings equal VERSION.txt, each carries LICENSE.

Run it after VERSION.txt or LICENSE has changed. With --check it only looks, and exits with 1 when
something differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

PIN = re.compile(r'"(deepinfer(?:-[a-z]+)+)==[^"]*"')


def stale_files(root: Path) -> dict[Path, str]:
    """Every file that differs from what VERSION.txt and LICENSE ask for, with the text it needs."""
    version = (root / "VERSION.txt").read_text("ascii").strip()
    licence = (root / "LICENSE").read_text("ascii")
    stale = {}
    for project in [root / "pyproject.toml", *sorted(root.glob("packages/*/pyproject.toml"))]:
        text = project.read_text("utf-8")
        wanted = PIN.sub(rf'"\1=={version}"', text)
        if wanted != text:
            stale[project] = wanted
        copy = project.parent / "LICENSE"
        if not copy.is_file() or copy.read_text("ascii") != licence:
            stale[copy] = licence
    return stale


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 when stale")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout")
    args = parser.parse_args(argv)
    stale = stale_files(args.root)
    for path, text in stale.items():
        print(f"{'stale' if args.check else 'wrote'}: {path.relative_to(args.root)}")
        if not args.check:
            path.write_text(text, "utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
