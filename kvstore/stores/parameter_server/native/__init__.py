"""Sessions and slices of a server as C structs, and the Cython classes that own them."""
