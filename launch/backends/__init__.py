"""How ranks are started on clusters: one file, or package, per scheduler or launcher."""
