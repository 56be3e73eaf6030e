"""Pages about runs that need no network: figures for every viewer, and curves with a shared cursor."""
