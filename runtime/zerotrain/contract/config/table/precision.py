"""Rows of the table: number formats and the reduction of gradients."""

from __future__ import annotations

from zerotrain.contract.config.keys import Choice, Key, KeyKind, Status

DTYPES = (
    Choice(value="fp32"),
    Choice(value="float32", means="fp32"),
    Choice(value="bf16"),
    Choice(value="bfloat16", means="bf16"),
    Choice(value="fp16"),
    Choice(value="float16", means="fp16"),
)

PRECISION: tuple[Key, ...] = (
    Key(
        path="bf16.enabled",
        kind=KeyKind.BOOL,
        default=False,
        auto="bf16",
        effect="Parameters, activations and gradients in bf16; master weights and optimizer states in fp32, "
        "unless two keys below say otherwise.",
    ),
    Key(
        path="bf16.immediate_grad_update",
        kind=KeyKind.BOOL,
        default=False,
        needs="bf16.enabled",
        status=Status.ACCEPTED,
        off=(True,),
        note="Gradients go into the accumulation buffer unit by unit during backward.",
        effect="Accumulate at once; always so here.",
    ),
    Key(
        path="bf16.check_grad_overflow",
        kind=KeyKind.BOOL,
        default=True,
        needs="bf16.enabled",
        effect="Skip a step whose gradients are not finite; false = apply it. Always on in fp16 and fp32.",
    ),
    Key(
        path="bf16.auto_cast",
        kind=KeyKind.BOOL,
        default=False,
        needs="bf16.enabled",
        effect="Cast fp32 arguments of the model to bf16, those in lists, mappings and dataclasses too; "
        "false = they arrive as they are. "
        "Not a key of DeepSpeed, which never casts them in bf16.",
    ),
    Key(
        path="bf16.store_param_remainders",
        kind=KeyKind.BOOL,
        default=None,
        needs="bf16.enabled",
        effect="The bf16 weight is the upper half of the fp32 master weight and 16 bits of remainder are its "
        "lower half: 10 bytes of state per element, not 12, and the same master to the bit. Exact ties "
        "round up in the weight. Adam, AdamW, Adagrad and Lion only; absent = on where states are "
        "offloaded. Not a key of DeepSpeed.",
    ),
    Key(
        path="bf16.bf16_master_weights_and_grads",
        kind=KeyKind.BOOL,
        default=False,
        needs="bf16.enabled",
        effect="The bf16 weight is its own master weight, and gradients are summed in bf16: 8 bytes of "
        "state and 2 of gradient per element, not 12 and 4. Updates are computed in fp32 and rounded to "
        "nearest. At every stage and with every offload; AdamW, Adam, SGD, Adagrad and Lion only.",
    ),
    Key(
        path="bf16.bf16_optimizer_states",
        kind=KeyKind.BOOL,
        default=False,
        needs="bf16.enabled",
        effect="Optimizer states in bf16, 4 bytes per element with Adam; only with "
        "bf16_master_weights_and_grads.",
    ),
    *(
        Key(
            path=f"bf16.{name}",
            kind=kind,
            default=None,
            needs="bf16.enabled",
            status=Status.ACCEPTED,
            note="bf16 has the range of fp32 and needs no loss scale.",
            effect="No effect; a key of fp16 that many files repeat here.",
        )
        for name, kind in (
            ("loss_scale", KeyKind.FLOAT),
            ("initial_scale_power", KeyKind.INT),
            ("loss_scale_window", KeyKind.INT),
            ("hysteresis", KeyKind.INT),
            ("consecutive_hysteresis", KeyKind.BOOL),
            ("min_loss_scale", KeyKind.FLOAT),
        )
    ),
    Key(
        path="fp16.enabled",
        kind=KeyKind.BOOL,
        default=False,
        auto="fp16",
        effect="Parameters, activations and gradients in fp16 with loss scaling; states in fp32.",
    ),
    Key(
        path="fp16.auto_cast",
        kind=KeyKind.BOOL,
        default=False,
        needs="fp16.enabled",
        effect="Cast fp32 arguments of the model to fp16, those in lists, mappings and dataclasses too; "
        "false = they arrive as they are.",
    ),
    Key(
        path="fp16.loss_scale",
        kind=KeyKind.FLOAT,
        default=0.0,
        minimum=0.0,
        needs="fp16.enabled",
        effect="0 = dynamic, else the fixed factor.",
    ),
    Key(
        path="fp16.initial_scale_power",
        kind=KeyKind.INT,
        default=16,
        minimum=0,
        needs="fp16.enabled",
        effect="Dynamic scaling starts at 2 ** this.",
    ),
    Key(
        path="fp16.loss_scale_window",
        kind=KeyKind.INT,
        default=1000,
        minimum=1,
        needs="fp16.enabled",
        effect="Steps without overflow before the scale doubles and the hysteresis is full again.",
    ),
    Key(
        path="fp16.hysteresis",
        kind=KeyKind.INT,
        default=2,
        minimum=1,
        needs="fp16.enabled",
        effect="Which overflow halves the scale: 2 = the second, and every one after it until it is "
        "refilled.",
    ),
    Key(
        path="fp16.consecutive_hysteresis",
        kind=KeyKind.BOOL,
        default=False,
        needs="fp16.enabled",
        effect="A good step refills the hysteresis.",
    ),
    Key(
        path="fp16.min_loss_scale",
        kind=KeyKind.FLOAT,
        default=1.0,
        minimum=0.0,
        needs="fp16.enabled",
        effect="Smallest scale.",
    ),
    Key(
        path="fp16.raise_error_at_min_scale",
        kind=KeyKind.BOOL,
        default=True,
        needs="fp16.enabled",
        effect="Stop with an error when the scale would have to fall below the smallest; false = go on "
        "skipping steps. DeepSpeed always stops.",
    ),
    Key(
        path="fp16.fp16_master_weights_and_grads",
        kind=KeyKind.BOOL,
        default=False,
        needs="fp16.enabled",
        status=Status.NOT_RUN,
        note="Master weights are fp32.",
        way_out="Remove fp16.fp16_master_weights_and_grads.",
        effect="Master weights and gradients in fp16.",
    ),
    Key(
        path="fp16.opt_level",
        aliases=("fp16_opt_level",),
        kind=KeyKind.TEXT,
        default=None,
        needs="fp16.enabled",
        status=Status.ACCEPTED,
        note="Apex is not used; DeepSpeed has never read it either.",
        effect="No effect; a level of Apex.",
    ),
    Key(
        path="fp16.fused_mode",
        kind=KeyKind.BOOL,
        default=True,
        needs="fp16.enabled",
        status=Status.ACCEPTED,
        note="There is one fused update.",
        effect="No effect.",
    ),
    Key(
        path="data_types.grad_accum_dtype",
        kind=KeyKind.TEXT,
        default="fp32",
        choices=(
            Choice(value="fp32"),
            Choice(value="float32", means="fp32"),
            *(
                Choice(
                    value=name,
                    means="fp32",
                    status=Status.ACCEPTED,
                    note="Gradients are summed in fp32, or with bf16_master_weights_and_grads in bf16.",
                )
                for name in ("bf16", "bfloat16", "fp16", "float16")
            ),
        ),
        effect="Dtype in which gradients of micro-batches are summed; bf16 with "
        "bf16_master_weights_and_grads, whose absence it cannot replace.",
    ),
    Key(
        path="data_types.param_dtype",
        kind=KeyKind.TEXT,
        default=None,
        choices=DTYPES,
        status=Status.ACCEPTED,
        note="bf16.enabled and fp16.enabled alone decide.",
        effect="bf16.enabled and fp16.enabled alone decide.",
    ),
    Key(
        path="data_types.buffer_dtype",
        kind=KeyKind.TEXT,
        default=None,
        choices=DTYPES,
        effect="Cast the model's floating-point buffers to this dtype; absent = they keep theirs. Running "
        "statistics of torch's BatchNorm take the dtype of its weights in any case.",
    ),
    Key(
        path="data_types.keep_in_fp32_modules",
        kind=KeyKind.TEXTS,
        default=None,
        off=([],),
        status=Status.ACCEPTED,
        note="Buffers with such names are not cast; every parameter takes the compute dtype, with an fp32 "
        "master weight.",
        effect="Buffers that keep their dtype, by a part of their name or a pattern such as `*.rotary.*`.",
    ),
    Key(
        path="communication_data_type",
        kind=KeyKind.TEXT,
        default=None,
        choices=DTYPES,
        effect="Gradients wider than this are narrowed for the wire; they are always summed in fp32. "
        "Absent = fp32, which narrows nothing (DeepSpeed: the compute dtype).",
    ),
    Key(
        path="seq_parallel_comm_data_type",
        aliases=("seq_parallel_communication_data_type",),
        kind=KeyKind.TEXT,
        default="fp32",
        choices=DTYPES,
        status=Status.ACCEPTED,
        note="There is no sequence parallelism here.",
        effect="No effect.",
    ),
    Key(
        path="prescale_gradients",
        kind=KeyKind.BOOL,
        default=False,
        effect="Divide gradients by the number of ranks before they travel, not after the sum. Of use only "
        "where fp16 on the wire overflows: sums are fp32 here.",
    ),
    Key(
        path="gradient_predivide_factor",
        kind=KeyKind.FLOAT,
        default=1.0,
        minimum=1e-6,
        effect="Divide gradients by this before they travel, and by the rest after the sum; without effect "
        "beside prescale_gradients, as in DeepSpeed.",
    ),
    Key(
        path="gradient_allreduce_op",
        kind=KeyKind.TEXT,
        default="mean",
        choices=(
            Choice(value="mean"),
            Choice(value="sum", note="The ranks' gradients are added up and not divided by their number."),
        ),
        effect="How the ranks' gradients are combined.",
    ),
    Key(
        path="sparse_gradients",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.ACCEPTED,
        note="Gradients of embeddings are dense.",
        effect="DeepSpeed: sparse reduction of embeddings.",
    ),
    Key(
        path="fp8.enabled",
        kind=KeyKind.BOOL,
        default=False,
        effect="Compute the products of linear layers in FP8, forward and backward; needs bf16, in which "
        "weights, activations and gradients stay. On GPUs of compute capability 8.9 or newer; a CPU computes "
        "the same numbers, slower than bf16.",
    ),
    Key(
        path="fp8.recipe",
        kind=KeyKind.TEXT,
        default="rowwise",
        needs="fp8.enabled",
        choices=(
            Choice(value="rowwise", note="A scale for every row of each operand; all of them are e4m3."),
            Choice(value="tensorwise", note="One scale for each operand; gradients are e5m2."),
        ),
        effect="How operands are scaled, by the largest magnitude of the current tensor.",
    ),
    Key(
        path="fp8.exclude",
        kind=KeyKind.TEXTS,
        default=["lm_head", "head", "embed_out"],
        needs="fp8.enabled",
        effect="Linear layers that stay in bf16, by the last parts of their names or patterns such as "
        "`*.attention.*`. The default is the output head, whose rounding errors would reach the loss "
        "directly; [] excludes nothing.",
    ),
    Key(
        path="fp8.weight_gradient",
        kind=KeyKind.TEXT,
        default="bf16",
        needs="fp8.enabled",
        choices=(Choice(value="bf16"), Choice(value="fp8")),
        effect="Format of the product that gives the weights' gradients. Where 16 does not divide the tokens "
        "of a forward pass it is bf16 in any case.",
    ),
    Key(
        path="torch_autocast.enabled",
        kind=KeyKind.BOOL,
        default=False,
        effect="Run forward under torch.autocast; parameters, gradients and states stay fp32, and what "
        "autocast made of the weights lives until backward, at stage 3 too.",
    ),
    Key(
        path="torch_autocast.dtype",
        kind=KeyKind.TEXT,
        default="bf16",
        needs="torch_autocast.enabled",
        choices=(
            Choice(value="bf16"),
            Choice(value="bfloat16", means="bf16"),
            Choice(value="fp16", note="With the loss scale of the fp16 block's keys."),
            Choice(value="float16", means="fp16"),
        ),
        effect="Dtype of autocast.",
    ),
    Key(
        path="torch_autocast.lower_precision_safe_modules",
        kind=KeyKind.TEXTS,
        default=None,
        needs="torch_autocast.enabled",
        status=Status.ACCEPTED,
        note="communication_data_type alone says how gradients travel.",
        effect="DeepSpeed: modules that communicate in that dtype.",
    ),
    Key(
        path="amp",
        kind=KeyKind.OBJECT,
        default=None,
        status=Status.NOT_RUN,
        note="Apex is not used.",
        way_out='Write "bf16": {"enabled": true} instead.',
        effect="Apex mixed precision.",
    ),
)
