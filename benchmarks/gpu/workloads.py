"""W1-W5 without the command line around them: python benchmarks/gpu/workloads.py --shape qwen3-0.6b ..."""

from __future__ import annotations

import argparse
import logging
import sys

from octavo.bench import gpu

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=gpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu.add_arguments(parser)
    sys.exit(gpu.run(parser.parse_args()))
