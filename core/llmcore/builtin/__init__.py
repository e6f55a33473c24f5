"""Policy that ships inside, through the same hooks as anybody's: named in the loader's list, imported by nobody."""
