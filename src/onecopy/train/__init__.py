"""The trainer behind `onecopy train`: a small GPT, plain text, and a loop on the public engine."""
