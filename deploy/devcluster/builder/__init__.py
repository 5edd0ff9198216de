"""Builds the development cluster's programs and images.

Standard library only: on a fresh machine this runs before anything else is installed.
"""
