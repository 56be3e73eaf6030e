"""`python -m launch` is `megalite`."""

from launch.cli.app import main

if __name__ == "__main__":
    main()
