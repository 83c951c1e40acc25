"""The `onecopy` command: one module a verb, imported when its verb is used."""
