"""A folder for `sys.path`: the `deepspeed` module and its distribution's metadata."""
