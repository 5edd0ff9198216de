"""Build of the development cluster's programs (`tools`) and of the image of its pods (`image`).

The Makefile, the test fixtures and users call this file. It only makes the package beside it importable under
the one name that the tests and the type checker also use.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from deploy.devcluster.builder.cli import main  # noqa: E402  (needs the path above)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], REPOSITORY))
