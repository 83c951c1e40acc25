"""What a rank of `onecopy run` executes: install the `deepspeed` module, then the script as Python itself would.

Arguments: "force" or "installed" (with "+local_rank": `--local_rank=N` goes to the script too), "script" or "module", its name, and
the script's own arguments, passed on as they are.
"""

from __future__ import annotations

import os
import runpy
import sys

from onecopy.integrations.deepspeed import install


def main() -> None:
    """Run the script named on the command line as `__main__`."""
    words, kind, name, *arguments = sys.argv[1:]
    choice, _, local_rank = words.partition("+")
    if local_rank:  # where DeepSpeed's launcher puts it
        arguments = [f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    if kind == "script" and not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(name))  # where `python -m` has put the working directory
    install(force=choice == "force")
    sys.argv = [name, *arguments]
    if kind == "module":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
