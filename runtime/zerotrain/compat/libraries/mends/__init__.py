"""Changes of other libraries' modules, a module per library; `table.SURFACES` names each function.

They are loaded when their library is imported.
"""
