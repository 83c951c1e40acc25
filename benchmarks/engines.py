"""The engines that are compared, each as its own users would write it, behind one `step(micro_batches)`."""

import argparse
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import workload
from benchmarks.workload import BETAS, CLIP, DECAY, DTYPES, EPSILON, LEARNING_RATE

Batches = Sequence[torch.Tensor]


class TrainsOneStep(Protocol):
    def step(self, micro_batches: Batches) -> torch.Tensor: ...


def build(name: str, arguments: argparse.Namespace) -> TrainsOneStep:
    """`local`, `ddp`, `fsdp2`, `fsdp2-z2`, `ds1..3`, `onecopy0..3`."""
    if name == "local":
        return Local(arguments)
    if name == "ddp" or name.startswith("fsdp2"):
        return Torch(name, arguments)
    library, stage = name[:-1], int(name[-1])
    return Configured(library, stage, arguments)


class Local:
    """The floor: forward and backward in low precision without communication, AdamW on this rank's share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model = workload.make_model(arguments).to(DTYPES[arguments.dtype])
        share = sum(p.numel() for p in self.model.parameters()) // dist.get_world_size()
        flat = nn.Parameter(torch.zeros(share))
        flat.grad = torch.zeros(share)
        self.optimizer = torch.optim.AdamW([flat], lr=LEARNING_RATE, fused=True)

    def step(self, micro_batches: Batches) -> torch.Tensor:
        for tokens in micro_batches:
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        self.optimizer.step()
        self.model.zero_grad()
        return loss.detach()


class Torch:
    """DDP, or FSDP2 with and without resharding after the forward; fp32 masters, gradients reduced in fp32."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.dtype = DTYPES[arguments.dtype]
        self.autocast = name == "ddp" and self.dtype != torch.float32
        self.model = workload.make_model(arguments)
        if name == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        else:
            self._shard(reshard=name == "fsdp2")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True
        )

    def _shard(self, reshard: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        low = self.dtype != torch.float32
        policy = (
            MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
        )
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in [*self.model.model.layers, self.model]:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)

    def step(self, micro_batches: Batches) -> torch.Tensor:
        for tokens in micro_batches:
            with torch.autocast("cpu", self.dtype, enabled=self.autocast):
                loss = self.model(input_ids=tokens, labels=tokens).loss
            (loss / len(micro_batches)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Configured:
    """DeepSpeed or onecopy: one JSON document, `initialize`, `backward`, `step`."""

    def __init__(self, library: str, stage: int, arguments: argparse.Namespace) -> None:
        initialize, model = _library(library, arguments)
        self.engine, *_ = initialize(
            model=model, model_parameters=model.parameters(), config=document(stage, arguments)
        )

    def step(self, micro_batches: Batches) -> torch.Tensor:
        for tokens in micro_batches:
            loss = self.engine(input_ids=tokens, labels=tokens).loss
            self.engine.backward(loss)
            self.engine.step()
        return loss.detach()


def _library(name: str, arguments: argparse.Namespace) -> tuple[Any, nn.Module]:
    model = workload.make_model(arguments)
    if name == "onecopy":
        import onecopy

        return onecopy.initialize, model
    warnings.filterwarnings("ignore")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    return deepspeed.initialize, model.to(DTYPES[arguments.dtype])


def document(stage: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration both libraries get."""
    adam = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": DECAY, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": arguments.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": int(5e8),
            "stage3_prefetch_bucket_size": int(5e8),
            "stage3_param_persistence_threshold": int(1e5),
        },
    }
