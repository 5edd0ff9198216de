"""`python -m zerotrain.runtime.launch`."""

import sys

from zerotrain.runtime.launch.main import main

sys.exit(main(sys.argv[1:]))
