"""Rows of the table: the optimizer and its parameters."""

from __future__ import annotations

from zerotrain.contract.config.keys import Choice, Key, KeyKind, Status

_ADAM = ("AdamW", "Adam")
_ADAM_LIKE = (*_ADAM, "Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Lion", "Muon", "MuAdam", "MuAdamW")
_ONE_BIT = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
_LAMB = ("Lamb", "OneBitLamb")
_USE_ADAMW = 'Set optimizer.type to "AdamW".'
_NOT_RUN = {
    "ZeroOneAdam": "0/1 Adam skips rounds of communication by its own schedule; OneBitAdam compresses alike.",
    "OneBitLamb": "1-bit Lamb's ratios are learnt in its warm-up; OneBitAdam compresses alike.",
    **dict.fromkeys(
        ("MuAdam", "MuAdamW", "MuSGD"),
        "muP needs the shapes of a base model; set the rates of parameter groups with model_parameters.",
    ),
}

OPTIMIZER: tuple[Key, ...] = (
    Key(
        path="optimizer.type",
        kind=KeyKind.TEXT,
        default=None,
        effect="The optimizer that the engine builds; absent = the caller's.",
        choices=(
            Choice(value="AdamW", note="Adam with decoupled weight decay, fp32 states."),
            Choice(value="SGD", note="Gradient descent with torch's momentum, fp32 states."),
            Choice(value="Adam", note="As AdamW unless adam_w_mode is false (then L2), as in DeepSpeed."),
            Choice(
                value="DeepSpeedCPUAdam",
                means="AdamW",
                status=Status.ACCEPTED,
                note="AdamW by the native one-pass kernel where the states are on CPU; by torch on GPU.",
            ),
            Choice(value="FusedAdam", means="Adam", status=Status.ACCEPTED, note="Read as Adam."),
            Choice(
                value="CPUAdam",
                means="Adam",
                status=Status.ACCEPTED,
                note="Adam by the native one-pass kernel where the states are on CPU; by torch on GPU.",
            ),
            Choice(value="Lamb", note="As DeepSpeed's FusedLamb; the norms of parameters cover all shards."),
            Choice(value="Adagrad", note="As torch's, one fp32 state; on CPU by the native one-pass kernel."),
            Choice(
                value="Lion",
                note="The sign of a mixed momentum, decoupled weight decay, one fp32 state; on CPU by the "
                "native one-pass kernel.",
            ),
            Choice(
                value="Muon",
                note="As torch's, for hidden matrices; embeddings, heads and what is no matrix take AdamW. "
                "Groups choose by use_muon. Two fp32 states.",
            ),
            Choice(
                value="OneBitAdam",
                note="Stages 0 and 1. After freeze_step ranks exchange signs with error feedback, nothing "
                "is clipped, and the second moment stays. No bias correction, as in DeepSpeed.",
            ),
            *(
                Choice(value=name, status=Status.NOT_RUN, note=note, way_out=_USE_ADAMW)
                for name, note in _NOT_RUN.items()
            ),
        ),
    ),
    Key(
        path="optimizer.params.lr",
        kind=KeyKind.FLOAT,
        default=1e-3,
        minimum=0.0,
        auto="learning_rate",
        effect="Base learning rate.",
    ),
    Key(
        path="optimizer.params.betas",
        kind=KeyKind.FLOATS,
        default=[0.9, 0.999],
        minimum=0.0,
        maximum=1.0,
        only=_ADAM_LIKE,
        default_by_type={"Lion": [0.9, 0.99]},
        auto="betas",
        effect="Decay of the first and second moment.",
    ),
    Key(
        path="optimizer.params.eps",
        kind=KeyKind.FLOAT,
        default=1e-8,
        minimum=0.0,
        only=(*_ADAM_LIKE, "Adagrad"),
        default_by_type={"Adagrad": 1e-10},
        auto="eps",
        effect="Added to the root of the second moment.",
    ),
    Key(
        path="optimizer.params.weight_decay",
        kind=KeyKind.FLOAT,
        default=0.0,
        minimum=0.0,
        auto="weight_decay",
        effect="Weight decay.",
    ),
    Key(
        path="optimizer.params.adam_w_mode",
        kind=KeyKind.BOOL,
        default=True,
        only=_ADAM,
        effect="Adam only: decouple weight decay from the gradient. AdamW always does.",
    ),
    Key(
        path="optimizer.params.bias_correction",
        kind=KeyKind.BOOL,
        default=True,
        only=(*_ADAM, *_LAMB, *_ONE_BIT),
        effect="Correct the moments' start at zero.",
    ),
    Key(
        path="optimizer.params.amsgrad",
        kind=KeyKind.BOOL,
        default=False,
        only=_ADAM,
        effect="AMSGrad: divide by the largest second moment so far; a third fp32 state.",
    ),
    Key(
        path="optimizer.params.torch_adam",
        kind=KeyKind.BOOL,
        default=False,
        only=(*_ADAM, "Adagrad", "Lion", "Muon"),
        effect="true: torch's arithmetic, operation by operation; false: on CPU the native one-pass kernel, "
        "which differs in rounding and is the same at every stage and thread count; on GPU a kernel of the "
        "same bits for Adam and AdamW, or torch's fused one where that cannot be used.",
    ),
    *(
        Key(
            path=f"optimizer.params.{name}",
            kind=KeyKind.BOOL,
            default=default,
            status=Status.ACCEPTED,
            off=(True, False),
            note="The engine's update is always one fused pass over the flat shard.",
            effect="Implementation detail of other optimizers; no effect here.",
        )
        for name, default in (
            ("fused", None),
            ("foreach", None),
            ("capturable", None),
            ("set_grad_none", True),
        )
    ),
    Key(
        path="optimizer.params.fp32_optimizer_states",
        kind=KeyKind.BOOL,
        default=True,
        only=_ADAM,
        status=Status.NOT_RUN,
        note="Optimizer states are fp32.",
        way_out="Set fp32_optimizer_states to true.",
        effect="Keep optimizer states in fp32.",
    ),
    Key(
        path="optimizer.params.max_grad_norm",
        kind=KeyKind.FLOAT,
        default=0.0,
        minimum=0.0,
        status=Status.ACCEPTED,
        note="An optimizer does not clip here (nor in DeepSpeed): set gradient_clipping.",
        effect="No effect; see gradient_clipping.",
    ),
    Key(
        path="optimizer.params.momentum",
        kind=KeyKind.FLOAT,
        default=0.0,
        minimum=0.0,
        maximum=1.0,
        only=("SGD", "MuSGD", "Muon"),
        default_by_type={"Muon": 0.95},
        effect="Momentum.",
    ),
    Key(
        path="optimizer.params.dampening",
        kind=KeyKind.FLOAT,
        default=0.0,
        only=("SGD", "MuSGD"),
        effect="Dampening of the momentum.",
    ),
    Key(
        path="optimizer.params.nesterov",
        kind=KeyKind.BOOL,
        default=False,
        only=("SGD", "MuSGD", "Muon"),
        default_by_type={"Muon": True},
        effect="Nesterov momentum.",
    ),
    Key(
        path="optimizer.params.max_coeff",
        kind=KeyKind.FLOAT,
        default=10.0,
        only=_LAMB,
        effect="Largest trust ratio.",
    ),
    Key(
        path="optimizer.params.min_coeff",
        kind=KeyKind.FLOAT,
        default=0.01,
        only=_LAMB,
        effect="Smallest trust ratio.",
    ),
    Key(
        path="optimizer.params.eps_inside_sqrt",
        kind=KeyKind.BOOL,
        default=False,
        only=(*_LAMB, *_ONE_BIT),
        effect="Add eps under the root.",
    ),
    Key(
        path="optimizer.params.lr_decay",
        kind=KeyKind.FLOAT,
        default=0.0,
        only=("Adagrad",),
        effect="Decay of the learning rate.",
    ),
    Key(
        path="optimizer.params.initial_accumulator_value",
        kind=KeyKind.FLOAT,
        default=0.0,
        only=("Adagrad",),
        effect="Start of the sum of squares.",
    ),
    Key(
        path="optimizer.params.muon_lr",
        kind=KeyKind.FLOAT,
        default=None,
        only=("Muon",),
        minimum=0.0,
        effect="Learning rate of the matrices; absent = lr.",
    ),
    Key(
        path="optimizer.params.adam_lr",
        kind=KeyKind.FLOAT,
        default=None,
        only=("Muon",),
        minimum=0.0,
        effect="Learning rate of the rest, which AdamW updates; absent = lr.",
    ),
    Key(
        path="optimizer.params.ns_method",
        kind=KeyKind.TEXT,
        default=None,
        only=("Muon",),
        choices=(
            Choice(value="standard", note="Newton-Schulz iterations on the matrix."),
            Choice(
                value="gram",
                means="standard",
                status=Status.ACCEPTED,
                note="The same iteration up to rounding, on the matrix.",
            ),
        ),
        effect="Method of orthogonalisation.",
    ),
    Key(
        path="optimizer.params.ns_coefficients",
        kind=KeyKind.FLOATS,
        default=[3.4445, -4.775, 2.0315],
        only=("Muon",),
        effect="Coefficients of a Newton-Schulz iteration.",
    ),
    Key(
        path="optimizer.params.ns_steps",
        kind=KeyKind.INT,
        default=5,
        minimum=1,
        maximum=99,
        only=("Muon",),
        effect="Newton-Schulz iterations.",
    ),
    Key(
        path="optimizer.params.ns_eps",
        kind=KeyKind.FLOAT,
        default=1e-7,
        minimum=0.0,
        only=("Muon",),
        effect="Smallest norm by which a matrix is divided (eps of torch.optim.Muon; eps is AdamW's).",
    ),
    Key(
        path="optimizer.params.adjust_lr_fn",
        kind=KeyKind.TEXT,
        default=None,
        only=("Muon",),
        choices=(
            Choice(value="original", note="Times the root of max(1, rows / columns); the default."),
            Choice(value="match_rms_adamw", note="Times 0.2 and the root of the larger dimension."),
        ),
        effect="Factor of a matrix's learning rate by its shape.",
    ),
    Key(
        path="optimizer.params.freeze_step",
        kind=KeyKind.INT,
        default=100_000,
        minimum=1,
        only=("OneBitAdam", "OneBitLamb"),
        effect="Updates before momenta are compressed and the second moment stays. Elements that had no "
        "gradient until then get none later.",
    ),
    Key(
        path="optimizer.params.cuda_aware",
        kind=KeyKind.BOOL,
        default=False,
        only=_ONE_BIT,
        status=Status.ACCEPTED,
        note="Compressed momenta go through the engine's own collectives.",
        effect="DeepSpeed: MPI detail.",
    ),
    Key(
        path="optimizer.params.comm_backend_name",
        kind=KeyKind.TEXT,
        default="nccl",
        only=_ONE_BIT,
        status=Status.ACCEPTED,
        note="Compressed momenta go through the engine's own collectives.",
        effect="DeepSpeed: backend of the compressed all-reduce.",
    ),
    Key(
        path="optimizer.params.var_freeze_step",
        kind=KeyKind.INT,
        default=100_000,
        minimum=1,
        only=("ZeroOneAdam",),
        effect="Step from which the variance stays.",
    ),
    *(
        Key(
            path=f"optimizer.params.{name}",
            kind=KeyKind.INT,
            default=default,
            minimum=1,
            only=("ZeroOneAdam",),
            effect="Schedule of 0/1 Adam.",
        )
        for name, default in (
            ("var_update_scaler", 16),
            ("local_step_scaler", 32678),
            ("local_step_clipper", 16),
        )
    ),
    *(
        Key(
            path=f"optimizer.params.{name}",
            kind=KeyKind.FLOAT,
            default=default,
            only=("OneBitLamb",),
            effect="Trust ratio of 1-bit Lamb.",
        )
        for name, default in (
            ("coeff_beta", 0.9),
            ("factor_max", 4.0),
            ("factor_min", 0.5),
            ("factor_threshold", 0.1),
        )
    ),
    Key(
        path="optimizer.legacy_fusion",
        kind=KeyKind.BOOL,
        default=False,
        status=Status.ACCEPTED,
        note="There is one fused update.",
        effect="DeepSpeed: an older fp16 wrapper.",
    ),
    Key(
        path="zero_allow_untested_optimizer",
        kind=KeyKind.BOOL,
        default=False,
        effect="Allow any element-wise torch optimizer, by its class name or given to initialize.",
    ),
    Key(
        path="zero_force_ds_cpu_optimizer",
        kind=KeyKind.BOOL,
        default=True,
        status=Status.ACCEPTED,
        note="The engine's own update is used wherever the states are.",
        effect="DeepSpeed: insist on its CPU optimizer when offloading.",
    ),
)
