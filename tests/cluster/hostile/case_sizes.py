"""Deep, large and slow objects that are expensive to read, to store or to check."""

from __future__ import annotations

from typing import Any

from tests.cluster.hostile.bodies import (
    MOST_BYTES,
    Post,
    config,
    core,
    job,
    keyed,
    listed,
    nested_lists,
    nested_objects,
)
from tests.cluster.hostile.cases import Bystander, add_jobs, case
from tests.support.jobs import ABSENT

Json = dict[str, Any]
DEPTHS = (300, 600, 1500, 3000)
SUSPENDED = {"spec.suspend": True}
FROM_MAP: Json = {
    "spec.config": ABSENT,
    "spec.configFrom": {"configMapKeyRef": {"name": "hostile-config", "key": "c.json"}},
}


def factory(**args: Any) -> Json:
    """Return the change that makes the model a function of the tenant."""
    return {"spec.model": {"factory": {"function": "m:f", "context": 64, "args": args}}}


def in_config(text: str, **keys: Any) -> tuple[Json, dict[str, str]]:
    return config(x="MARK", **keys), {"MARK": text}


add_jobs((f"deep-config-{depth}", *in_config(nested_objects(depth))) for depth in DEPTHS)
add_jobs((f"deep-lists-{depth}", *in_config(nested_lists(depth))) for depth in DEPTHS)
add_jobs((f"deep-args-{depth}", factory(x="MARK"), {"MARK": nested_objects(depth)}) for depth in DEPTHS)
add_jobs(
    (f"deep-asleep-{depth}", {**config(x="MARK"), **SUSPENDED}, {"MARK": nested_objects(depth)})
    for depth in DEPTHS
)
add_jobs(
    [
        ("deep-known-key", config(zero_optimization="MARK"), {"MARK": nested_objects(3000)}),
        ("deep-and-fat", *in_config(listed(nested_lists(200)))),
        ("fat-objects", *in_config(listed("{}"))),
        ("fat-nulls", *in_config(listed("0"))),
        ("fat-poses", *in_config(listed('{"metadata":{"uid":"u"},"status":{"phase":"Completed"}}'))),
        ("fat-empty-texts", *in_config(listed('""'))),
        ("fat-integers", *in_config(listed("1" * 4000))),
        ("fat-floats", *in_config(listed("1e308"))),
        ("fat-keys", *in_config(keyed("0", 500_000))),
        ("fat-long-keys", *in_config(keyed("0", 600_000, key="k" * 300 + "{}"))),
        ("fat-one-key", *in_config('{"' + "k" * 600_000 + '":1}')),
        ("fat-one-text", *in_config('"' + "x" * MOST_BYTES + '"')),
        ("fat-args", factory(x="MARK"), {"MARK": listed("{}")}),
        ("fat-known-list", config(zero_optimization={"spill": {"paths": "MARK"}}), {"MARK": listed('"/x"')}),
        ("fat-command", {"spec.command": ["x" * 8192] * 64, "spec.args": ["y" * 4000] * 200}, {}),
        ("slow-nested", *in_config(listed("[[[[]]]]"))),
        ("slow-unknown-keys", *in_config(keyed("{}", 500_000, key="zero_optimisation{}"))),
        ("number-integer", config(train_micro_batch_size_per_gpu="MARK"), {"MARK": "9" * 5000}),
        ("number-negative", config(gradient_accumulation_steps="MARK"), {"MARK": "-" + "9" * 19}),
        ("number-1e308", config(gradient_clipping="MARK"), {"MARK": "1e308"}),
        ("number-1e400", config(gradient_clipping="MARK"), {"MARK": "1e400"}),
        ("number-tiny", config(gradient_clipping="MARK"), {"MARK": "1e-400"}),
        ("number-as-text", config(gradient_clipping="9" * 100_000), {}),
        (
            "planner-largest",
            {"spec.model": {"gpt": {"dModel": 65536, "layers": 1024, "heads": 1024, "context": 1048576}}},
            {},
        ),
        ("planner-parameters", {"spec.model.parameters": 10**15}, {}),
        ("planner-ranks", {"spec.workers": 10_000, "spec.ranksPerWorker": 64, **SUSPENDED}, {}),
        ("long-name-" + "n" * 41, {}, {}),
    ]
)


def fat_asleep(name: str) -> Post:
    return job(name, {**config(x="MARK"), **SUSPENDED}, {"MARK": listed("{}")})


@case("fat-eight")
def _fat_eight(bystander: Bystander) -> list[Post]:
    return [fat_asleep(f"fat-eight-{number}") for number in range(8)]


@case("slow-touched", touches=1)
def _slow_touched(bystander: Bystander) -> list[Post]:
    change, raw = in_config(listed("[[[[]]]]"))
    return [job(f"slow-touched-{number}", change, raw) for number in range(4)]


@case("names-touched", touches=1)
def _names_touched(bystander: Bystander) -> list[Post]:
    """Post jobs whose free-form parts repeat a name of the spec, which its reader looks for."""
    change, raw = in_config(listed('{"args":1}'))
    return [job(f"names-touched-{number}", change, raw) for number in range(4)]


@case("fat-labels")
def _fat_labels(bystander: Bystander) -> list[Post]:
    labels = {f"label-{number}": "x" * 63 for number in range(3000)}
    return [job("fat-labels", labels=labels)]


@case("fat-annotations")
def _fat_annotations(bystander: Bystander) -> list[Post]:
    annotations = {f"annotation-{number}": nested_lists(100) for number in range(1200)}
    return [job("fat-annotations", annotations=annotations)]


@case("deep-annotation")
def _deep_annotation(bystander: Bystander) -> list[Post]:
    """Post a deep annotation of kubectl, the last applied object, which every reader must survive."""
    key = "kubectl.kubernetes.io/last-applied-configuration"
    return [job("deep-annotation", annotations={key: nested_lists(120_000)})]


def _config_map(name: str, text: str) -> tuple[str, str]:
    return name, text


CONFIG_TEXTS = (
    ("deep", nested_lists(500_000)),
    ("deep-600", nested_objects(600)),
    ("fat", '{"x":' + listed("{}", 1_000_000) + "}"),
    ("slow", '{"x":' + listed("[[[[]]]]", 1_000_000) + "}"),
    ("numbers", '{"train_micro_batch_size_per_gpu": ' + "9" * 100_000 + "}"),
    ("not-a-number", '{"gradient_clipping": NaN, "x": [Infinity, -Infinity, 1e400]}'),
    ("half-pairs", '{"\\ud800": "\\udfff", "optimizer": {"type": "\\ud83d"}}'),
    ("twice", '{"bf16": {}, "bf16": [], "bf16": 0}'),
    ("no-object", "[1, 2]"),
    ("no-json", "<html>\x1b]0;x\x07"),
    ("mark-of-order", "\ufeff{}"),
)


def _with_map(name: str, text: str) -> None:
    @case(name, alone=False)
    def posts(bystander: Bystander) -> list[Post]:
        source = {"configMapKeyRef": {"name": name, "key": "c.json"}}
        return [
            core("ConfigMap", name, data={"c.json": text}),
            job(name, {"spec.config": ABSENT, "spec.configFrom": source}),
        ]


for _name, _text in CONFIG_TEXTS:
    _with_map(f"from-map-{_name}", _text)
