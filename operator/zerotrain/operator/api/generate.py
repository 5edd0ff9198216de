"""Print the CRD: `python -m zerotrain.operator.api.generate > crds/zerotrain.dev_zerotrainingjobs.yaml`.

The same models give the same text, so that a test can compare.
"""

from __future__ import annotations

import io
import sys
from typing import Any

from ruamel.yaml import YAML

from .crd import custom_resource_definition

_HEADER = """\
# Generated from the models in operator/zerotrain/operator/api; do not edit.
# python -m zerotrain.operator.api.generate > crds/zerotrain.dev_zerotrainingjobs.yaml
"""


def render() -> str:
    """Return the CRD as YAML text."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 110
    yaml.sort_base_mapping_type_on_output = True
    text = io.StringIO()
    yaml.dump(custom_resource_definition(), text)
    return _HEADER + text.getvalue()


if __name__ == "__main__":
    sys.stdout.write(render())
