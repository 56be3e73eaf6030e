"""Entry of the `megalite` command, which is `python -m launch` too.

Nothing is imported before Ctrl-C is answered with a sentence: the imports of the command line take a second.
"""

from __future__ import annotations


def main() -> None:
    """Runs the command line."""
    try:
        from launch.cli.app import main as run

        run()
    except KeyboardInterrupt:
        import sys

        from megalite.resilience.signals import INTERRUPTED_CODE

        print("megalite: warning: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED_CODE)


if __name__ == "__main__":
    main()
