"""The encryption that a StorageClass declares for its volumes, by the parameters of known drivers.

Drivers that encrypt without a parameter in the class (a policy of the account, LUKS under LVM) need the
annotation of the class's owner: the operator accepts only a written declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from zerotrain.contract.text import word
from zerotrain.operator.constants import ANNOTATION_ENCRYPTED_VOLUMES


def _is_true(value: str) -> bool:
    return value.strip().lower() in ("true", "yes", "1")


def _is_given(value: str) -> bool:
    return bool(value.strip())


@dataclass(frozen=True, slots=True)
class Declaration:
    """A driver's parameter, and the values that mean encryption."""

    provisioners: tuple[str, ...]
    """Whole names, or suffixes of names with a leading dot: Ceph operators prefix their namespace."""
    parameter: str
    means_encryption: Callable[[str], bool] = _is_true


DECLARATIONS: Final = (
    Declaration(("ebs.csi.aws.com", "ebs.csi.eks.amazonaws.com", "kubernetes.io/aws-ebs"), "encrypted"),
    # Google encrypts all disks; a class can declare only a customer-managed key.
    Declaration(("pd.csi.storage.gke.io", "kubernetes.io/gce-pd"), "disk-encryption-kms-key", _is_given),
    Declaration(("disk.csi.azure.com", "kubernetes.io/azure-disk"), "diskEncryptionSetID", _is_given),
    Declaration(("rbd.csi.ceph.com", ".rbd.csi.ceph.com"), "encrypted"),
    Declaration(("pxd.portworx.com", "kubernetes.io/portworx-volume"), "secure"),
    Declaration(("driver.longhorn.io",), "encrypted"),
    Declaration(("diskplugin.csi.alibabacloud.com",), "encrypted"),
    Declaration(("storage.csi.upcloud.com",), "encryption", lambda value: value == "data-at-rest"),
)


def declared_encryption(item: Mapping[str, Any]) -> str | None:
    """Return the declaration that the class's volumes are encrypted, e.g. `parameter encrypted: true`; None
    without one."""
    declared = (item["metadata"].get("annotations") or {}).get(ANNOTATION_ENCRYPTED_VOLUMES)
    if declared is not None:
        return f"annotation {ANNOTATION_ENCRYPTED_VOLUMES}" if declared == "true" else None
    # Drivers read the names of their parameters case-insensitively.
    given = {name.lower(): str(value) for name, value in (item.get("parameters") or {}).items()}
    for row in DECLARATIONS:
        value = given.get(row.parameter.lower())
        if (
            _is_of(str(item.get("provisioner", "")), row)
            and value is not None
            and row.means_encryption(value)
        ):
            return f"parameter {row.parameter}: {word(value)}"
    return None


def _is_of(provisioner: str, row: Declaration) -> bool:
    return any(
        provisioner == name or (name.startswith(".") and provisioner.endswith(name))
        for name in row.provisioners
    )
