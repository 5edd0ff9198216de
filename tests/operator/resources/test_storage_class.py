"""Parameters of a StorageClass that count as a declaration that its volumes are encrypted."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.operator.resources.storage_class import declared_encryption

pytestmark = pytest.mark.unit


ANNOTATION = "zerotrain.dev/encrypted-volumes"


def storage_class(provisioner: str, word: str | None = None, **parameters: str) -> dict[str, Any]:
    meta = {"name": "fast", **({"annotations": {ANNOTATION: word}} if word is not None else {})}
    return {"metadata": meta, "provisioner": provisioner, "parameters": parameters}


DECLARED = [
    storage_class("ebs.csi.aws.com", encrypted="true", type="gp3"),
    storage_class("kubernetes.io/aws-ebs", Encrypted="True"),
    storage_class("pd.csi.storage.gke.io", **{"disk-encryption-kms-key": "projects/p/keys/k"}),
    storage_class("disk.csi.azure.com", diskEncryptionSetID="/subscriptions/s/des"),
    storage_class("disk.csi.azure.com", diskencryptionsetid="/subscriptions/s/des"),
    storage_class("rbd.csi.ceph.com", encrypted="true", encryptionKMSID="spill store"),
    storage_class("rook-ceph.rbd.csi.ceph.com", encrypted="true"),
    storage_class("pxd.portworx.com", secure="true"),
    storage_class("driver.longhorn.io", encrypted="true"),
    storage_class("diskplugin.csi.alibabacloud.com", encrypted="true"),
    storage_class("storage.csi.upcloud.com", encryption="data-at-rest"),
    storage_class("topolvm.io", "true"),
]

SILENT = [
    storage_class("ebs.csi.aws.com"),
    storage_class("ebs.csi.aws.com", encrypted="false"),
    storage_class("ebs.csi.aws.com", kmsKeyId="arn:aws:kms:k"),
    storage_class("pd.csi.storage.gke.io", **{"disk-encryption-kms-key": " "}),
    storage_class("storage.csi.upcloud.com", encryption="none"),
    storage_class("topolvm.io", encrypted="true"),
    storage_class("evilrbd.csi.ceph.com", encrypted="true"),
    storage_class("topolvm.io", "yes"),
    storage_class("ebs.csi.aws.com", "false", encrypted="true"),
    {"metadata": {"name": "fast", "annotations": None}, "provisioner": "p", "parameters": None},
]


@pytest.mark.parametrize("item", DECLARED, ids=lambda item: f"{item['provisioner']}-{item['parameters']}")
def test_what_declares_encryption(item: dict[str, Any]) -> None:
    assert declared_encryption(item)


@pytest.mark.parametrize("item", SILENT, ids=str)
def test_what_does_not(item: dict[str, Any]) -> None:
    assert declared_encryption(item) is None
