"""`zerotrain init`: a valid and planned job file from a few answers.

`command` takes options and asks for the rest. `answers` holds and checks them. `propose` lets the memory
planner choose, and writes the YAML with its comments.
"""
