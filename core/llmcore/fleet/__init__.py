"""Several engines or servers behind one door. No torch."""
