"""Layers of other projects, used where they are installed. Each adapter follows the project's own documentation."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from perf.peers.base import Peer, Prepared, Rows, load
from perf.roofline import ELEMENT_BYTES
from perf.workloads import Inputs, Workload


class Quack(Peer):
    """QuACK's grouped GEMMs, the engine of SonicMoE, with torch's glue around them."""

    name = "quack"
    module = "quack.gemm_interface"
    what = (
        "whole layer, ids to output: torch's stable sort and searchsorted, gemm_gated (gathers x itself, SwiGLU fused,"
        " gate-up weight fused before), gemm, then torch's gather, weight multiply and sum (deterministic);"
        " its default configuration unless --tune-peers"
    )

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        quack = load("quack.gemm_interface")
        tune = self.prepared.tune
        rows = Rows(inputs, self.prepared)
        _, h_MI = quack.gemm_gated(
            inputs.x_TH,
            self.prepared.gate_up_EJH.transpose(1, 2),
            activation="swiglu",
            cu_seqlens_m=rows.offsets_E1,
            A_idx=rows.token_M.to(torch.int32),
            store_preact=False,
            tuned=tune,
            concat_layout=("B",),
        )
        down_EIH = self.prepared.weights.down_EHI.transpose(1, 2)
        return rows.combine(quack.gemm(h_MI, down_EIH, cu_seqlens_m=rows.offsets_E1, tuned=tune))


class SonicMoE(Peer):
    name = "sonicmoe"
    module = "sonicmoe"
    what = "whole layer, ids to output: moe_general_routing_inputs on a gate-up weight fused before, inference mode"

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        sonicmoe = load("sonicmoe")
        x_TH, ids_TK = inputs.x_TH, inputs.topk_ids_TK
        tokens, top_k = ids_TK.shape
        token_M = torch.arange(tokens, dtype=torch.int32, device=x_TH.device).repeat_interleave(top_k)
        with torch.no_grad():
            out_TH, _ = sonicmoe.moe_general_routing_inputs(
                x_TH,
                inputs.topk_weights_TK.flatten(),
                token_M,
                ids_TK.flatten().int(),
                self.prepared.gate_up_EJH.permute(1, 2, 0),
                None,
                self.prepared.weights.down_EHI.permute(1, 2, 0),
                None,
                E=self.prepared.experts,
                stream_id=torch.cuda.current_stream().cuda_stream,
                activation_type=load("sonicmoe.enums").ActivationType.SWIGLU,
                is_inference_mode_enabled=True,
                concat_layout=True,
            )
        return out_TH


class VllmTriton(Peer):
    name = "vllm_triton"
    module = "vllm.model_executor.layers.fused_moe"
    what = (
        "whole layer, ids to output: vLLM's fused_experts (Triton, deterministic) on a gate-up weight fused before,"
        " with the configuration that it picks by itself"
    )

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        return load(self.module).fused_experts(
            inputs.x_TH,
            self.prepared.gate_up_EJH,
            self.prepared.weights.down_EHI,
            inputs.topk_weights_TK.float(),
            inputs.topk_ids_TK.int(),
        )


class FlashInferFused(Peer):
    """FlashInfer's CuTe DSL layer for Hopper; its weights have up and gate rows interleaved by 32."""

    name = "flashinfer_cutedsl"
    module = "flashinfer.fused_moe.cute_dsl.sm90_fused_moe"
    fused_finalize: ClassVar[bool] = True
    what = (
        "whole layer, ids to output: cute_dsl_fused_moe_bf16 on weights interleaved before; sums with bf16 atomics"
        " (not deterministic); its default tactic unless --tune-peers"
    )

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        gemm1 = load("flashinfer.fused_moe.cute_dsl.sm90_contiguous_gather_grouped_gemm_act_fusion")
        self._gate_up_EJH = gemm1.interleave_up_gate_sm90(prepared.gate_up_EJH).contiguous()
        self._tuned_tokens: set[int] = set()

    @classmethod
    def extra_bytes(cls, workload: Workload) -> int:
        return 2 * workload.experts * workload.hidden * workload.intermediate * ELEMENT_BYTES

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        tokens, top_k = inputs.topk_ids_TK.shape
        with self._tuning(tokens):
            return load(self.module).cute_dsl_fused_moe_bf16(
                inputs.x_TH,
                inputs.topk_ids_TK.int(),
                inputs.topk_weights_TK.float(),
                self._gate_up_EJH,
                self.prepared.weights.down_EHI,
                num_experts=self.prepared.experts,
                top_k=top_k,
                use_fused_finalize=self.fused_finalize,
            )

    def _tuning(self, tokens: int) -> AbstractContextManager[object]:
        """FlashInfer's tuner on the first call of a token count, where tuning is asked for."""
        if not self.prepared.tune or tokens in self._tuned_tokens:
            return nullcontext()
        self._tuned_tokens.add(tokens)
        return load("flashinfer").autotune(True)


class FlashInferOrdered(FlashInferFused):
    name = "flashinfer_cutedsl_ordered"
    fused_finalize = False
    what = (
        "whole layer, ids to output: cute_dsl_fused_moe_bf16 on weights interleaved before, deterministic path (rows"
        " expanded, summed in slot order); its default tactic unless --tune-peers"
    )


class LigerKernel(Peer):
    name = "liger"
    module = "liger_kernel.ops"
    capturable = False
    what = (
        "whole layer, ids to output, eager (one host sync inside): LigerFusedMoEFunction forward on a gate-up weight"
        " fused before; also writes the pre-activation that its backward wants; its one fixed configuration unless"
        " --tune-peers"
    )

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        if not prepared.tune:  # read on import; tuning compiles 104 kernels for each shape
            os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        with torch.no_grad():
            return load(self.module).LigerFusedMoEFunction.apply(
                inputs.x_TH,
                self.prepared.gate_up_EJH,
                self.prepared.weights.down_EHI,
                inputs.topk_ids_TK.int(),
                inputs.topk_weights_TK,
            )
