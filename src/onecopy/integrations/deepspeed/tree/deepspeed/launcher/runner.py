"""The `deepspeed` command, and what accelerate reads of it."""

import os

from onecopy.integrations.deepspeed.launcher import main, parse_args

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main", "parse_args"]

if __name__ == "__main__":
    main()
