"""Other people's programs on onecopy: the `deepspeed` module they import, and what accelerate needs on CPU ranks."""
