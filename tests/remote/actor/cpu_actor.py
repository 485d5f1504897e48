"""ndif's model actor for a machine without a GPU; the server imports it (NDIF_MODEL_IMPORT_PATH).

The stock actor selects a CUDA device, checks that the weights are on it, and synchronises with it after each
request. Everything else (queueing, unpacking a request, running its block) stays the stock actor's.
"""

from __future__ import annotations

import gc

import ray
from ndif.services.ray.deployments.modeling.base import BaseModelDeployment
from nnsight.modeling.huggingface import HuggingFaceModel


class CpuModel(BaseModelDeployment):
    CACHEABLE = False  # parking moves weights between a GPU and the CPU

    def load_from_disk(self) -> HuggingFaceModel:
        model = HuggingFaceModel.from_model_key(
            self.model_key, dispatch=True, dtype=self.dtype_name, device="cpu", **self.kwargs
        )
        model._module.requires_grad_(False)
        return model

    def cleanup(self) -> None:
        self.kill_switch.clear()
        self.kill_reason = self.execution_ident = None
        self.model.interleaver.cancel()
        gc.collect()


@ray.remote(num_cpus=0, max_restarts=-1)
class CpuModelActor(CpuModel):
    pass
