"""`python -m wavetrain` is the command line."""

import sys

from wavetrain.cli import main

sys.exit(main())
