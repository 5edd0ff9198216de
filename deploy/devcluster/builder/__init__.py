"""Builder of the development cluster's programs and images.

It uses only the standard library, because on a fresh machine it runs before anything else is installed.
"""
