"""`python -m zerotrain.cli`: the command line where its script is not on the path, as in a container."""

from zerotrain.cli.main import main

if __name__ == "__main__":
    main()
