"""`onecopy export`: write the weights of a checkpoint as safetensors that vLLM and transformers open.

Nothing is gathered: a few blocks are in memory at a time, whatever the size of the model.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("checkpoint", metavar="CKPT", help="folder of checkpoints, or of one of them")
    parser.add_argument("output", metavar="OUT", help="folder to write into")
    parser.add_argument("--tag", help="which checkpoint (default: the newest complete one)")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16, fp32 or as-trained (default: bf16)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: 5GB)")
    parser.add_argument("--format", choices=("safetensors", "torch"), default="safetensors", help="kind of file")
    parser.add_argument("--exclude-frozen", action="store_true", help="trained weights only, an adapter's say")
    parser.add_argument("--model", metavar="DIR", help="folder to copy configuration and tokenizer files from")


def run(arguments: argparse.Namespace) -> int:
    """Export and list the files."""
    from onecopy.checkpoint.export import export

    name = "model.safetensors" if arguments.format == "safetensors" else "pytorch_model.bin"
    files = export(
        arguments.checkpoint, arguments.output, arguments.dtype, arguments.max_shard_size, arguments.tag, name,
        arguments.exclude_frozen, arguments.model,
    )  # fmt: skip
    for path in files:
        print(f"{path}  {path.stat().st_size:,} bytes")
    return 0
