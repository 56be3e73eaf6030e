"""Configs from the files of other stacks: `megalite config from`."""
