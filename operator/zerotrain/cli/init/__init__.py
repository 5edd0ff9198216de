"""`zerotrain init`: from a few answers to a job file that is valid and planned.

`command` takes options and asks for the rest, `answers` holds and checks them, `propose` lets the memory
planner choose, `document` writes the YAML with its comments.
"""
