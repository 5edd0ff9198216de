"""`zerotrain report`: one self-contained HTML page about a run.

`command` takes the options, `cluster` and `folders` gather a `facts.Report`, `charts` draws the charts, and
`page` writes the page.
"""
