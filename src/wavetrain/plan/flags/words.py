"""Megatron-LM's words for ours, for writing its flags and for reading them.

Source: Megatron-LM at 000c4ac24f61159c138b0975def722c65245983c, megatron/training/arguments.py. Flags that have no
bearing on what a step costs are known so that nobody is warned of them; those that have one we can't price are not.
"""

from __future__ import annotations

from wavetrain.plan.stack import AttentionImpl


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ATTENTION = {
    "flash": AttentionImpl.FLASH2,
    "fused": AttentionImpl.CUDNN,
    "unfused": AttentionImpl.FUSED_SOFTMAX,
    "local": AttentionImpl.FUSED_SOFTMAX,
    "auto": AttentionImpl.FLASH2,
}
POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
RECOMPUTE = ("full", "selective")
VOCAB_UNIT = 128  # of --make-vocab-size-divisible-by

WHOLES = _listed(
    """
num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels num-query-groups max-position-embeddings
vocab-size padded-vocab-size make-vocab-size-divisible-by num-experts moe-ffn-hidden-size moe-router-topk
seq-length micro-batch-size global-batch-size
tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
expert-model-parallel-size expert-tensor-parallel-size
num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
num-distributed-optimizer-instances recompute-num-layers
"""
)

SWITCHES = _listed(
    """
group-query-attention swiglu squared-relu quick-geglu disable-bias-linear add-qkv-bias qk-layernorm
untie-embeddings-and-output-weights use-rotary-position-embeddings
sequence-parallel use-tp-pp-dp-mapping use-distributed-optimizer use-megatron-fsdp use-custom-fsdp use-torch-fsdp2
torch-fsdp2-no-reshard-after-forward account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
overlap-grad-reduce tp-comm-overlap recompute-activations bf16 fp16 grad-reduce-in-bf16
accumulate-allreduce-grads-in-fp32 use-flash-attn no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
no-bias-dropout-fusion
"""
)

CHOICES: dict[str, tuple[str, ...]] = {
    "attention-backend": tuple(ATTENTION),
    "position-embedding-type": tuple(POSITIONS),
    "normalization": tuple(NORMS),
    "data-parallel-sharding-strategy": STRATEGIES,
    "recompute-granularity": RECOMPUTE,
    "recompute-method": ("uniform", "block"),
    "fp8-format": ("e4m3", "hybrid"),
}
NUMBERS = ("hidden-dropout", "attention-dropout")
TEXTS = ("pipeline-model-parallel-layout",)

READ = (*WHOLES, *SWITCHES, *CHOICES, *NUMBERS, *TEXTS)

NO_BEARING = _listed(
    """
adam-beta1 adam-beta2 adam-eps adlr-autoresume adlr-autoresume-interval app-tag-run-name app-tag-run-version
apply-layernorm-1p apply-query-key-layer-scaling async-save attention-softmax-in-fp32 auto-detect-ckpt-format
calculate-per-token-loss check-for-large-grads check-for-nan-in-loss-and-grad check-for-spiky-loss ckpt-format ckpt-step
ckpt-fully-parallel-load ckpt-fully-parallel-save clip-grad config-logger-dir data-args-path data-cache-path data-path
data-parallel-random-init dataloader-type ddp-average-in-collective decoupled-lr decoupled-min-lr dist-ckpt-format
dist-ckpt-strictness distributed-backend distributed-timeout-minutes embedding-init-method-std end-weight-decay
eod-mask-loss eval-interval eval-iters exit-duration-in-mins exit-interval exit-on-missing-checkpoint
exit-signal-handler finetune fp8-amax-compute-algo fp8-amax-history-len fp8-interval fp8-margin fp8-recipe
hysteresis init-method-std init-method-xavier-uniform init-model-with-meta-device initial-loss-scale lazy-mpu-init load
local-rank log-energy log-interval log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress
log-straggler log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard
logging-level loss-scale loss-scale-window lr lr-decay-iters lr-decay-samples lr-decay-style lr-warmup-fraction
lr-warmup-init lr-warmup-iters lr-warmup-samples lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style manual-gc
manual-gc-interval merge-file min-loss-scale min-lr mock-data moe-aux-loss-coeff moe-input-jitter-eps
moe-per-layer-logging moe-router-load-balancing-type moe-router-pre-softmax moe-router-score-function moe-z-loss-coeff
no-async-tensor-model-parallel-allreduce no-check-for-nan-in-loss-and-grad no-create-attention-mask-in-dataloader
no-gradient-accumulation-fusion no-initialization no-load-optim no-load-rng no-mmap-bin-files no-one-logger
no-overlap-p2p-communication no-save-optim no-save-rng norm-epsilon num-dataset-builder-threads num-workers
one-logger-project one-logger-run-name openai-gelu optimizer override-opt-param-scheduler override-opt_param-scheduler
per-split-data-args-path pretrained-checkpoint profile profile-ranks profile-step-end profile-step-start
record-memory-history rerun-mode reset-attention-mask reset-position-ids rotary-base rotary-interleaved
rotary-seq-len-interpolation-factor rope-scaling-factor rope-type sample-rate save save-interval save-retain-interval
seed split start-weight-decay tensorboard-dir tensorboard-log-interval tensorboard-queue-size test-data-path
tiktoken-num-special-tokens tiktoken-pattern timing-log-level timing-log-option tokenizer-metadata tokenizer-model
tokenizer-type train-data-path train-iters train-samples train-sync-interval transformer-impl trust-remote-code
use-checkpoint-args use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler use-cpu-initialization
use-dist-ckpt use-mcore-models use-mp-args-from-checkpoint-args use-persistent-ckpt-worker use-pytorch-profiler
use-rope-scaling use-te-activation-func valid-data-path vocab-extra-ids vocab-file wandb-entity wandb-exp-name
wandb-project wandb-save-dir weight-decay weight-decay-incr-style
"""
)

UNPRICED = _listed(
    """
cp-comm-type cpu-offloading-num-layers cross-entropy-fusion-impl cross-entropy-loss-fusion
cuda-graph-impl cuda-graph-scope ddp-bucket-size ddp-num-buckets ddp-reduce-scatter-with-fp32-accumulation
defer-embedding-wgrad-compute delay-wgrad-compute deterministic-mode distribute-saved-activations
empty-unused-memory-level enable-cuda-graph enable-full-sharding-in-hsdp exp-avg-dtype exp-avg-sq-dtype
external-cuda-graph fp32-residual-connection fp8-param-gather fsdp-double-buffer hierarchical-context-parallel-sizes
keep-fp8-transpose-cache kv-lora-rank main-grads-dtype main-params-dtype
microbatch-group-size-per-virtual-pipeline-stage moe-enable-deepep moe-expert-capacity-factor moe-grouped-gemm
moe-layer-freq moe-pad-expert-input-to-capacity moe-permute-fusion moe-router-dtype moe-router-fusion
moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-token-dispatcher-type mtp-num-layers
multi-latent-attention no-align-grad-reduce no-align-param-gather no-persist-layer-norm no-rope-freq no-rope-fusion
no-scatter-gather-tensors-in-pipeline optimizer-cpu-offload optimizer-offload-fraction
overlap-moe-expert-parallel-comm overlap-p2p-communication-warmup-flush overlap-param-gather
overlap-param-gather-with-optimizer-step q-lora-rank qk-head-dim qk-pos-emb-head-dim rampup-batch-size
recompute-modules rotary-percent suggested-communication-unit-size tp-comm-overlap-cfg use-legacy-models use-nccl-ub
use-precision-aware-optimizer use-sharp v-head-dim window-attn-skip-freq window-size wgrad-deferral-limit
"""
)
