"""`python -m protofed`, the same as `protofed`."""

import sys

from protofed.cli import main

sys.exit(main())
