"""`python -m onecopy` is the `onecopy` command."""

import sys

from onecopy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
