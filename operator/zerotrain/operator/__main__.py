"""`python -m zerotrain.operator`"""

from zerotrain.operator.main import run

run()
