"""Check of a whole checkpoint against the model and optimizer that load it. Pure; every mismatch is named."""

from __future__ import annotations

from collections.abc import Mapping

from zerotrain.runtime.checkpoint.errors import CheckpointMismatch
from zerotrain.runtime.checkpoint.manifest import Manifest, TensorEntry
from zerotrain.runtime.checkpoint.names import EXTRA_STATE
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.state import MASTER, PARAM, CheckpointState, is_optional


def stored_tensors(manifest: Manifest, layout: ModelLayout, unit_name: str) -> Mapping[str, TensorEntry]:
    """Return the stored entry of every parameter of a unit, found by name whatever unit held it at the save;
    tied parameters are found by any of their names."""
    found = {}
    for segment in layout.unit(unit_name).segments:
        further = (alias for alias, owner in layout.aliases.items() if owner == segment.fqn)
        for name in (segment.fqn, *further):
            entry = manifest.tensors.get(manifest.aliases.get(name, name))
            if entry is not None:
                found[segment.fqn] = entry
                break
    return found


def source_kind(manifest: Manifest, entry: TensorEntry, kind: str) -> str | None:
    """Return the stored kind that `kind` of a parameter is read from; None when it is not there.

    A parameter that was frozen at the save and is trained now gets its fp32 value from the frozen one, and
    the other way round.
    """
    kinds = manifest.units[entry.unit].kinds
    if kind in kinds:
        return kind
    other = {MASTER: PARAM, PARAM: MASTER}.get(kind)
    return other if other in kinds else None


def check_match(manifest: Manifest, state: CheckpointState, *, strict: bool = True) -> None:
    """Raise CheckpointMismatch naming the first parameter or state that does not fit.

    Not `strict`: names that only the model or only the checkpoint has are passed over.
    """
    if strict:
        _check_names(manifest, state)
        _check_extra(set(manifest.scalars.get(EXTRA_STATE, {})), set(state.extra))
    for unit_name, kind in state.streams:
        unit = state.layout.unit(unit_name)
        stored = stored_tensors(manifest, state.layout, unit_name)
        for segment in unit.segments:
            if segment.fqn not in stored:
                continue
            entry = stored[segment.fqn]
            if entry.shape != segment.shape:
                raise CheckpointMismatch(
                    f"parameter {segment.fqn!r} has shape {list(segment.shape)} in the model and "
                    f"{list(entry.shape)} in the checkpoint; give the model its old sizes or another folder"
                )
            if source_kind(manifest, entry, kind) is None and not is_optional(kind):
                source = manifest.units[entry.unit]
                was = "trained" if source.trainable else "frozen"
                raise CheckpointMismatch(
                    f"parameter {segment.fqn!r} needs state {kind!r} but was {was} with state "
                    f"{sorted(source.kinds)} when the checkpoint was written; "
                    "keep optimizer and frozen parameters as they were, load with "
                    "load_optimizer_states=False, or start afresh"
                )


def _check_extra(stored: set[str], wanted: set[str]) -> None:
    """Compare the keys of what modules add to a state dict (`get_extra_state`)."""
    if missing := sorted(wanted - stored):
        raise CheckpointMismatch(
            f"the checkpoint holds no {missing[0]!r} ({len(missing)} missing in all), which the module's "
            "set_extra_state wants; the model must be the one that was saved, or load with "
            "load_module_strict=False"
        )
    if surplus := sorted(stored - wanted):
        raise CheckpointMismatch(
            f"the checkpoint holds {surplus[0]!r} ({len(surplus)} in all), and that module of the model has "
            "no get_extra_state; the model must be the one that was saved, or load with "
            "load_module_strict=False"
        )


def _check_names(manifest: Manifest, state: CheckpointState) -> None:
    model = {segment.fqn for unit in state.layout.units for segment in unit.segments}
    stored = set(manifest.tensors)
    found = {fqn for unit in state.layout.units for fqn in stored_tensors(manifest, state.layout, unit.name)}
    missing = sorted(model - found)
    if missing:
        frozen = {part.fqn for unit in state.layout.units if not unit.trainable for part in unit.segments}
        way_out = "the model must be the one that was saved"
        if frozen.issuperset(missing):
            way_out += ", or, when it was saved without frozen parameters, load_module_strict False"
        raise CheckpointMismatch(
            f"the checkpoint holds no parameter {missing[0]!r} ({len(missing)} missing in all); {way_out}"
        )
    known = model | set(state.layout.aliases)
    extra = sorted(
        fqn
        for fqn in stored
        if fqn not in known
        and not any(alias in known for alias, owner in manifest.aliases.items() if owner == fqn)
    )
    if extra:
        raise CheckpointMismatch(
            f"the checkpoint holds parameter {extra[0]!r} the model does not have ({len(extra)} in all); "
            "the model must be the one that was saved"
        )
