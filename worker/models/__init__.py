"""Model families: wiring and weight names only; the layers do the work."""
