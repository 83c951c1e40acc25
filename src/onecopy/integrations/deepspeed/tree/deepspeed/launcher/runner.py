"""What accelerate reads of the launcher; starting ranks is `onecopy run`'s work."""

import os

from onecopy.integrations.deepspeed.refusal import TORCHRUN, refused_function

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
main = refused_function("launcher.runner.main", TORCHRUN)
