"""Parts of other people's training libraries on which zerotrain relies, and those that it mends.

`table.SURFACES` lists every private symbol with its library, versions and reason. `watch` applies the rows of
a module when a program imports it, by the functions of `mends`; a module that nobody imports costs nothing.
"""

from zerotrain.compat.libraries.imports import watch

__all__ = ["watch"]
