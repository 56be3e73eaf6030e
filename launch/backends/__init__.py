"""Back ends that start ranks on clusters: one file or package per scheduler or launcher."""
