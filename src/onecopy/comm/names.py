"""torch 2.13 renamed two collectives and warns on the old names; 2.11 and 2.12 know only the old ones."""

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
