"""The version; nothing is compiled, so there are no extensions to list."""

from . import __version__ as version

git_hash = git_branch = None
installed_ops: dict[str, bool] = {}
accelerator_name = ""

__all__ = ["accelerator_name", "git_branch", "git_hash", "installed_ops", "version"]
