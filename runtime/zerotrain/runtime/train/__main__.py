"""Entry point of a rank."""

from zerotrain.runtime.train.main import main

if __name__ == "__main__":
    main()
