"""`python -m octavo.entrypoints.api_server --model M`: the spelling of old guides for `octavo serve M`."""

from __future__ import annotations

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
